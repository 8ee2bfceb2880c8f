//! Hubs and ranks in one process, over sockets.

mod losses;
mod refusals;
mod room;
mod rows;
mod strangers;
mod support;
