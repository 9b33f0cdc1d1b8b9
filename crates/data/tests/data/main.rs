//! The crate as its users see it: files in, batches and messages out.

mod adult;
mod batches;
mod formats;
mod garbage;
mod made;
mod malformed;
mod shards;
mod synth;
