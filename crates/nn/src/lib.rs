//! Models: from rows and numbers to a loss, gradients and scores.
//!
//! This crate knows no network, reads no files and starts no threads. The map:
//!
//! - [`model`]: [`Model`], the contract; [`Input`] and [`Gradients`], what goes in and out.
//! - [`zoo`]: the models that ship, one per file; [`build`] makes one from a job's `model` part.
//! - `layers`: what the models share: the wide part, the factorization machine, the dense network.

pub mod error;
mod layers;
pub mod model;
pub mod zoo;

pub use error::{Error, Result};
pub use model::{Gradients, Input, Model, TableInput};
pub use zoo::build;
