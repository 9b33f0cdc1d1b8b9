//! Edge: who is let in to call the master. Over TLS only who shows the job's certificate is; gRPC and HTTP
//! come in through the same port.
//!
//! Handshakes run beside each other and within a deadline, so that nobody who does not finish one is in the
//! way of others.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::serve::Listener;
use elasticdl_wire::{Error as WireError, Identity};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, mpsc};
use tokio::task::JoinHandle;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use tracing::{debug, warn};

use crate::error::{Error, Result};

/// How long a handshake may take.
const HANDSHAKE_MAX: Duration = Duration::from_secs(10);
/// Handshakes at one time.
const HANDSHAKES_MAX: usize = 1024;
/// How long a peer that was refused may take to read why.
const FAREWELL_MAX: Duration = Duration::from_secs(1);

type Shaken = (TlsStream<TcpStream>, SocketAddr);

/// Answers calls from now on.
pub fn serve(
    listener: TcpListener,
    identity: Option<&Identity>,
    app: axum::Router,
) -> Result<JoinHandle<io::Result<()>>> {
    let Some(identity) = identity else {
        return Ok(tokio::spawn(axum::serve(listener, app).into_future()));
    };
    let secure = Secure::new(listener, identity).map_err(|e| Error::io("starting to listen", e))?;
    Ok(tokio::spawn(axum::serve(secure, app).into_future()))
}

/// A listener whose connections are of the job. Accepting ends when it is dropped.
pub struct Secure {
    address: SocketAddr,
    shaken: mpsc::Receiver<Shaken>,
}

impl Secure {
    /// Lets in who comes to `listener` and shows the job's certificate.
    pub fn new(listener: TcpListener, identity: &Identity) -> io::Result<Self> {
        let address = listener.local_addr()?;
        // gRPC speaks HTTP/2 and asks for it; the client of people speaks HTTP/1.1.
        let acceptor = TlsAcceptor::from(identity.server_of(&[b"h2", b"http/1.1"]));
        let (sender, shaken) = mpsc::channel(16);
        tokio::spawn(accept(listener, acceptor, sender));
        Ok(Secure { address, shaken })
    }
}

impl Listener for Secure {
    type Io = TlsStream<TcpStream>;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> Shaken {
        match self.shaken.recv().await {
            Some(shaken) => shaken,
            // The runtime is ending, or the task that accepts would be there.
            None => std::future::pending().await,
        }
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        Ok(self.address)
    }
}

async fn accept(mut listener: TcpListener, acceptor: TlsAcceptor, shaken: mpsc::Sender<Shaken>) {
    let room = Arc::new(Semaphore::new(HANDSHAKES_MAX));
    loop {
        let place = Arc::clone(&room).acquire_owned().await.expect("it is never closed");
        // Of the two ways to accept, the one that copes with errors.
        let (stream, peer) = tokio::select! {
            accepted = Listener::accept(&mut listener) => accepted,
            () = shaken.closed() => return,
        };
        let (acceptor, shaken) = (acceptor.clone(), shaken.clone());
        tokio::spawn(async move {
            let outcome = tokio::time::timeout(HANDSHAKE_MAX, shake(&acceptor, stream)).await;
            drop(place);
            match outcome.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into())).map_err(WireError::shaking)
            {
                // Nobody takes it only where the master is ending.
                Ok(stream) => drop(shaken.send((stream, peer)).await),
                Err(error @ WireError::Handshake { .. }) => {
                    warn!(%peer, error = %error.chain(), "connection refused");
                }
                Err(error) => debug!(%peer, error = %error.chain(), "connection lost in the handshake"),
            }
        });
    }
}

async fn shake(acceptor: &TlsAcceptor, stream: TcpStream) -> io::Result<TlsStream<TcpStream>> {
    stream.set_nodelay(true)?;
    match acceptor.accept(stream).into_fallible().await {
        Ok(stream) => Ok(stream),
        Err((error, stream)) => {
            // It may be in no hurry to read why, and need not know.
            let _ = tokio::time::timeout(FAREWELL_MAX, drain(stream)).await;
            Err(error)
        }
    }
}

/// Passes over what a refused peer has sent: closing with unread bytes would reset the connection and take
/// the reason with it.
async fn drain(mut stream: TcpStream) -> io::Result<()> {
    stream.shutdown().await?;
    let mut buffer = [0; 4096];
    while stream.read(&mut buffer).await? > 0 {}
    Ok(())
}

#[cfg(test)]
mod tests;
