//! Hubs and ranks in one process, over sockets; and what a stranger may send them.

mod fuzz;
mod run;
