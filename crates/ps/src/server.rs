//! The edge where workers come in: TCP, plain or with TLS, one thread per connection, answers in the order of
//! requests.
//!
//! Sockets keep the buffers that the kernel sizes by itself: a size set by hand switches that off and is
//! capped by `net.core.*mem_max`, below what the kernel would give.

#![expect(clippy::disallowed_methods, reason = "an edge: it waits for sockets and keeps deadlines")]

use std::collections::BTreeMap;
use std::io::{self, Read};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use elasticdl_wire as wire;
use elasticdl_wire::connection::Who;
use elasticdl_wire::frame::{Frame, Limits};
use elasticdl_wire::ps::{self, kind};
use elasticdl_wire::{Identity, Stream, Token};
use tracing::{debug, info, warn};

use crate::error::{Error, Result};
use crate::partitions::Partitions;
use crate::requests::Requests;

/// A HELLO is short, so nobody without a token makes the server hold more than this.
const HELLO_LIMITS: Limits = Limits { words_max: 128 };
/// Connections at one time; there are some hundred workers at most.
const CONNECTIONS_MAX: usize = 4096;

/// What a server allows its peers.
#[derive(Debug, Clone, Copy)]
pub struct Options {
    /// The longest frame, in both directions.
    pub limits: Limits,
    /// How long a new connection may take to say who it is, TLS included.
    pub hello_deadline: Duration,
}

impl Default for Options {
    fn default() -> Self {
        Options { limits: Limits::default(), hello_deadline: Duration::from_secs(10) }
    }
}

/// A running server. It ends, and cuts its connections, when it is dropped.
#[derive(Debug)]
pub struct Server {
    address: SocketAddr,
    shared: Arc<Shared>,
    acceptor: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    partitions: Arc<Partitions>,
    token: Token,
    identity: Option<Identity>,
    options: Options,
    ending: AtomicBool,
    /// Open connections, so that they can be cut.
    connections: Mutex<BTreeMap<u64, TcpStream>>,
}

impl Server {
    /// Serves `partitions` to whoever connects to `listener` and has the token; with an identity also a
    /// certificate of the job.
    pub fn start(
        listener: TcpListener,
        token: Token,
        identity: Option<Identity>,
        partitions: Arc<Partitions>,
        options: Options,
    ) -> Result<Self> {
        let failed = |e| Error::io("starting to accept connections", e);
        let address = listener.local_addr().map_err(failed)?;
        let shared = Arc::new(Shared {
            partitions,
            token,
            identity,
            options,
            ending: AtomicBool::new(false),
            connections: Mutex::default(),
        });
        let accepting = Arc::clone(&shared);
        let acceptor = Builder::new()
            .name("ps-accept".into())
            .spawn(move || accept(&listener, &accepting))
            .map_err(failed)?;
        Ok(Server { address, shared, acceptor: Some(acceptor) })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.shared.ending.store(true, Ordering::SeqCst);
        // Accepting ends with the next connection: this one.
        let woken = TcpStream::connect_timeout(&self.address, Duration::from_secs(1));
        if let (Ok(_), Some(acceptor)) = (woken, self.acceptor.take()) {
            let _ = acceptor.join();
        }
        // Only then are there no more to come.
        for stream in self.shared.connections().values() {
            // A connection that is gone already needs no cutting.
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}

impl Shared {
    fn connections(&self) -> MutexGuard<'_, BTreeMap<u64, TcpStream>> {
        self.connections.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn accept(listener: &TcpListener, shared: &Arc<Shared>) {
    for number in 0.. {
        let accepted = listener.accept();
        if shared.ending.load(Ordering::SeqCst) {
            return;
        }
        let started = accepted.and_then(|(stream, peer)| begin(stream, peer, number, shared));
        if let Err(error) = started {
            // Out of descriptors or threads, as a rule: trying again at once would only spin.
            warn!(%error, "connection not accepted");
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

/// Gives a connection its thread.
fn begin(stream: TcpStream, peer: SocketAddr, number: u64, shared: &Arc<Shared>) -> io::Result<()> {
    let mut connections = shared.connections();
    if connections.len() >= CONNECTIONS_MAX {
        return Err(io::Error::other(format!("{CONNECTIONS_MAX} connections are open")));
    }
    connections.insert(number, stream.try_clone()?);
    drop(connections);
    let entry = Entry { number, shared: Arc::clone(shared) };
    let started = Builder::new().name(format!("ps-conn-{number}")).spawn(move || {
        match serve(stream, peer, &entry.shared) {
            Ok(()) => debug!(%peer, "connection closed"),
            Err(Error::Wire(wire::Error::Io { attempt, source })) => {
                debug!(%peer, %attempt, error = %source, "connection lost");
            }
            Err(error) => warn!(%peer, error = %error.chain(), "connection closed for a reason"),
        }
    });
    started.map(|_| ())
}

/// A connection's place in the list: given up when its thread ends, in a panic too, so that the peer
/// sees the end of it.
struct Entry {
    number: u64,
    shared: Arc<Shared>,
}

impl Drop for Entry {
    fn drop(&mut self) {
        self.shared.connections().remove(&self.number);
    }
}

/// Serves one connection until the peer closes it or does something wrong.
fn serve(tcp: TcpStream, peer: SocketAddr, shared: &Shared) -> Result<()> {
    prepare(&tcp).map_err(|e| wire::Error::io("setting up a connection", e))?;
    let until = Instant::now() + shared.options.hello_deadline;
    let mut stream = Stream::accepted(tcp, shared.identity.as_ref())?;
    if let Err(error) = shake(&mut stream, until) {
        // TLS has told the peer already; nothing can be said in frames.
        drain(stream.tcp());
        return Err(error);
    }
    let (mut request, mut reply) = (Frame::default(), Frame::default());
    let who = match hello(&mut stream, &mut request, shared, until) {
        Ok(who) => who,
        Err(error) => {
            refuse(&mut stream, &mut reply, 0, &error);
            return Err(error);
        }
    };
    info!(%peer, %who, "connected");
    reply.begin(kind::WELCOME, request.request());
    send(&mut stream, &mut reply)?;

    let mut requests = Requests::new(&shared.partitions, shared.options.limits).of(who);
    while request.read(&mut stream, shared.options.limits)? {
        let answered =
            requests.answer_in_parts(&request, &mut reply, &mut |part| part.write_part(&mut stream));
        if let Err(error) = answered {
            // Who has half an answer asks again, and hears who has the partition now.
            if matches!(error, Error::Left { .. }) {
                return Err(error);
            }
            refuse(&mut stream, &mut reply, request.request(), &error);
            return Err(error);
        }
        send(&mut stream, &mut reply)?;
    }
    Ok(())
}

fn prepare(stream: &TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    // A worker whose machine is gone says no goodbye; without this its thread would stay for ever.
    rustix::net::sockopt::set_socket_keepalive(stream, true)?;
    rustix::net::sockopt::set_tcp_keepidle(stream, Duration::from_secs(30))?;
    Ok(())
}

/// Finds out over TLS whether the peer is of this job.
fn shake(stream: &mut Stream, until: Instant) -> Result<()> {
    loop {
        let outcome = set_deadline(stream.tcp(), until).and_then(|()| stream.handshake());
        match outcome {
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            outcome => return Ok(outcome.map_err(wire::Error::shaking)?),
        }
    }
}

/// Reads the first frame and tells who has sent it.
fn hello(stream: &mut Stream, frame: &mut Frame, shared: &Shared, until: Instant) -> Result<Who> {
    let mut timed = Timed { stream, until };
    if !frame.read(&mut timed, HELLO_LIMITS)? {
        return Err(wire::Error::io("waiting for HELLO", io::ErrorKind::UnexpectedEof.into()).into());
    }
    if frame.kind() != kind::HELLO {
        return Err(wire::Error::Malformed(format!("{:#x} where HELLO was due", frame.kind())).into());
    }
    let mut payload = frame.payload();
    let token = payload.take_bytes()?;
    let who = Who::from_word(payload.take()?)?;
    payload.end()?;
    if !shared.token.matches(token) {
        return Err(wire::Error::Refused("wrong token: it is not the one of this job".into()).into());
    }
    let tcp = stream.tcp();
    let lifted = tcp.set_read_timeout(None).and_then(|()| tcp.set_write_timeout(None));
    lifted.map_err(|e| wire::Error::io("lifting the deadline", e))?;
    Ok(who)
}

fn send(stream: &mut Stream, frame: &mut Frame) -> Result<()> {
    Ok(frame.write(stream).map_err(|e| wire::Error::io("sending an answer", e))?)
}

/// Tells the peer why its connection ends. Best effort: it may be gone.
fn refuse(stream: &mut Stream, frame: &mut Frame, request: u64, error: &Error) {
    let reason = match error {
        Error::Wire(wire::Error::Io { .. }) => return,
        // Another try may help: the peer is to take it for a broken connection.
        Error::NoLeave { .. } => return,
        Error::Wire(wire::Error::Refused(reason)) => reason.clone(),
        other => other.chain(),
    };
    ps::refused(frame, request, &reason);
    if frame.write(stream).is_ok() && stream.finish().is_ok() {
        drain(stream.tcp());
    }
}

/// Passes over what the peer has sent, for a moment: closing with unread bytes would reset the connection and
/// take our last words with it.
fn drain(mut tcp: &TcpStream) {
    let until = Instant::now() + Duration::from_secs(1);
    let mut buffer = [0; 4096];
    while set_deadline(tcp, until).is_ok() && matches!(tcp.read(&mut buffer), Ok(n) if n > 0) {}
}

/// Reads until a moment, however slowly the bytes drip in.
struct Timed<'a> {
    stream: &'a mut Stream,
    until: Instant,
}

impl Read for Timed<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        set_deadline(self.stream.tcp(), self.until)?;
        self.stream.read(buffer)
    }
}

/// Makes the next call of the socket end by `until`.
fn set_deadline(tcp: &TcpStream, until: Instant) -> io::Result<()> {
    let left = until.saturating_duration_since(Instant::now());
    if left.is_zero() {
        return Err(io::ErrorKind::TimedOut.into());
    }
    tcp.set_read_timeout(Some(left))?;
    tcp.set_write_timeout(Some(left))
}
