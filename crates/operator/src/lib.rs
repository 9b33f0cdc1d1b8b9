//! Jobs on Kubernetes: what their pods look like, how they are started and watched, and who gets how many.
//!
//! The only crate that knows Kubernetes. The map:
//!
//! - [`names`]: names and labels of everything that belongs to a job.
//! - [`manifest`]: what a job's objects look like; pure.
//! - [`negotiate`]: how many workers each job may have; [`sharing`] lays before it what is known of nodes, pods
//!   and jobs, and [`placement`] knows which pods go where; pure.
//! - [`pod`]: what a pod's status means; pure.
//! - [`roster`]: the pods of a job as the watch tells of them, and what is news; pure.
//! - [`fleet`]: the edge that starts, stops and watches them.
//! - [`cluster`]: the edge that knows which cluster, and makes the objects of a job.
//! - [`recorder`]: the edge that tells what happens, for `kubectl get events`.
//! - [`supervise`]: what is to be done about a master; pure.
//! - [`watched`]: the pods of a job as a watch tells of them; pure.
//! - [`tunnel`]: the edge that reaches a port of a pod from outside the cluster.
//!
//! The operator, for jobs that are resources:
//!
//! - [`resource`]: a job file as an object, and the job it describes; [`crd`] defines it; pure.
//! - [`reconcile`]: what is to be done about one; pure.
//! - [`controller`]: the edge that sees and does it; [`report`] is what masters say, [`lease`] who may act.
//! - [`capacity`]: the edge that watches nodes and pods, and has the jobs agree.
//! - [`metrics`]: the edge that measures how long it takes, and counts what it asks.
//! - [`deploy`]: the files that bring all of it to a cluster; pure.

pub mod capacity;
pub mod cluster;
pub mod controller;
pub mod crd;
pub mod deploy;
pub mod error;
pub mod fleet;
pub mod lease;
pub mod manifest;
pub mod metrics;
pub mod names;
pub mod negotiate;
pub mod placement;
pub mod pod;
pub mod reconcile;
pub mod recorder;
pub mod report;
pub mod resource;
pub mod roster;
pub mod sharing;
pub mod supervise;
pub mod tunnel;
pub mod watched;

pub use error::{Error, Result};
