//! Tokenizers, chat templates, documents and the scoring of texts.

mod beginnings;
mod chat;
mod control_tokens;
mod documents;
mod evaluation;
mod strangers;
mod token_ids;
mod tokenizers;
