//! Edge: a port of this machine that leads to a job's master, wherever that runs.
//!
//! The API server carries the bytes, so that it works from wherever kubectl does. What they say is between the
//! client and the master: TLS goes through end to end.

use std::net::SocketAddr;

use tokio::io::copy_bidirectional;
use tokio::net::{TcpListener, TcpStream};
use tracing::debug;

use crate::cluster::{Cluster, leader};
use crate::error::{Error, Result};
use crate::manifest::MASTER_PORT;
use kube::ResourceExt;

/// Opens the port and serves it until the runtime ends.
pub async fn open(cluster: Cluster, job: String) -> Result<SocketAddr> {
    let failed = |source| Error::Io { attempt: "opening a port on this machine".into(), source };
    let listener = TcpListener::bind("127.0.0.1:0").await.map_err(failed)?;
    let address = listener.local_addr().map_err(failed)?;
    tokio::spawn(async move {
        loop {
            let Ok((stream, _)) = listener.accept().await else { continue };
            let (cluster, job) = (cluster.clone(), job.clone());
            tokio::spawn(async move {
                // Whoever called sees its connection close, and tries again.
                if let Err(error) = carry(stream, &cluster, &job).await {
                    debug!(error = error.chain(), "a call did not reach the master");
                }
            });
        }
    });
    Ok(address)
}

async fn carry(mut here: TcpStream, cluster: &Cluster, job: &str) -> Result<()> {
    let masters = cluster.masters(job).await?;
    let gone = || Error::Late { what: "no master runs".into(), seconds: 0, why: String::new() };
    let name = leader(&masters).ok_or_else(gone)?.name_any();
    let forward = cluster.pods_api().portforward(&name, &[MASTER_PORT]).await;
    let mut forward = forward.map_err(Error::api(format!("reaching {name}")))?;
    let mut there = forward.take_stream(MASTER_PORT).ok_or_else(gone)?;
    let failed = |source| Error::Io { attempt: format!("talking to {name}"), source };
    copy_bidirectional(&mut here, &mut there).await.map_err(failed)?;
    Ok(())
}
