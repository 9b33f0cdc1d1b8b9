//! The edge where workers come in: TCP, plain or with TLS, one thread per connection, answers in the order of
//! requests.
//!
//! Sockets keep the buffers that the kernel sizes by itself: a size set by hand switches that off and is
//! capped by `net.core.*mem_max`, below what the kernel would give.

#![expect(clippy::disallowed_methods, reason = "an edge: it waits for sockets and keeps deadlines")]

use std::collections::BTreeMap;
use std::io::{self, Read, Write};
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
use tracing::field::display;
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
    /// How long a peer may stand still in the middle of a frame, and how long it may take nothing of an answer.
    /// Between frames it may be silent for ever. Whoever was merely slow connects and asks again.
    pub stall_deadline: Duration,
}

impl Default for Options {
    fn default() -> Self {
        let (hello_deadline, stall_deadline) = (Duration::from_secs(10), Duration::from_secs(60));
        Options { limits: Limits::default(), hello_deadline, stall_deadline }
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
        let mut who = None;
        let outcome = serve(stream, peer, &entry.shared, &mut who);
        report(peer, who, outcome);
    });
    started.map(|_| ())
}

/// Tells why a connection has ended. Peers leave, and are killed, between two frames; what they leave half done, or do
/// wrong, somebody should hear of.
fn report(peer: SocketAddr, who: Option<Who>, outcome: Result<()>) {
    let who = who.map(display);
    match outcome {
        Ok(()) => debug!(%peer, who, "connection closed"),
        Err(Error::Wire(wire::Error::Io { attempt, source })) if is_loss(&source) => {
            debug!(%peer, who, %attempt, error = %source, "connection lost");
        }
        Err(error) => warn!(%peer, who, error = %error.chain(), "connection closed for a reason"),
    }
}

/// Whether a connection is merely gone: the system says so, or it has ended without a goodbye.
fn is_loss(error: &io::Error) -> bool {
    error.raw_os_error().is_some() || error.kind() == io::ErrorKind::UnexpectedEof
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

/// Serves one connection until the peer closes it or does something wrong. `who` it is is noted once it is known.
fn serve(tcp: TcpStream, peer: SocketAddr, shared: &Shared, who: &mut Option<Who>) -> Result<()> {
    prepare(&tcp).map_err(|e| wire::Error::io("setting up a connection", e))?;
    let Options { limits, hello_deadline, stall_deadline } = shared.options;
    let mut stream = Stream::accepted(tcp, shared.identity.as_ref())?;
    let mut timed = Timed { stream: &mut stream, until: Instant::now() + hello_deadline, hello_deadline };
    if let Err(error) = timed.shake() {
        // TLS has told the peer already; nothing can be said in frames.
        drain(stream.tcp());
        return Err(error);
    }
    let (mut request, mut reply) = (Frame::default(), Frame::default());
    let caller = match hello(timed, &mut request, shared) {
        Ok(caller) => *who.insert(caller),
        Err(error) => {
            refuse(&mut stream, &mut reply, 0, &error);
            return Err(error);
        }
    };
    info!(%peer, who = %caller, "connected");
    let mut steady = Steady::new(&mut stream, stall_deadline)?;
    reply.begin(kind::WELCOME, request.request());
    let mut requests = Requests::new(&shared.partitions, limits).of(caller);
    let outcome = converse(&mut steady, &mut request, &mut reply, limits, &mut requests);
    if let Err(error) = &outcome {
        refuse(&mut stream, &mut reply, request.request(), error);
    }
    outcome
}

/// Sends what is in `reply`, and answers requests until the peer closes.
fn converse(
    stream: &mut Steady<'_>,
    request: &mut Frame,
    reply: &mut Frame,
    limits: Limits,
    requests: &mut Requests<'_>,
) -> Result<()> {
    loop {
        reply.write(stream).map_err(|e| wire::Error::io("sending an answer", e))?;
        if !stream.next(request, limits)? {
            return Ok(());
        }
        requests.answer_in_parts(request, reply, &mut |part| part.write_part(stream))?;
    }
}

fn prepare(stream: &TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    // A worker whose machine is gone says no goodbye; without this its thread would stay for ever.
    rustix::net::sockopt::set_socket_keepalive(stream, true)?;
    rustix::net::sockopt::set_tcp_keepidle(stream, Duration::from_secs(30))?;
    Ok(())
}

/// Reads the first frame and tells who has sent it.
fn hello(mut timed: Timed<'_>, frame: &mut Frame, shared: &Shared) -> Result<Who> {
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
    Ok(who)
}

/// Tells the peer why its connection ends. Best effort: it may be gone.
fn refuse(stream: &mut Stream, frame: &mut Frame, request: u64, error: &Error) {
    let reason = match error {
        Error::Wire(wire::Error::Io { .. } | wire::Error::Truncated { .. }) => return,
        // Another try may help: the peer is to take it for a broken connection. Who has half an answer asks again, and
        // hears who has the partition now.
        Error::NoLeave { .. } | Error::Left { .. } => return,
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

/// The stream of a peer that has yet to say who it is: until a moment, however slowly the bytes drip in.
struct Timed<'a> {
    stream: &'a mut Stream,
    until: Instant,
    hello_deadline: Duration,
}

impl Timed<'_> {
    /// Finds out over TLS whether the peer is of this job.
    fn shake(&mut self) -> Result<()> {
        loop {
            match self.in_time(Stream::handshake) {
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                outcome => return Ok(outcome.map_err(wire::Error::shaking)?),
            }
        }
    }

    fn in_time<T>(&mut self, attempt: impl FnOnce(&mut Stream) -> io::Result<T>) -> io::Result<T> {
        let outcome = set_deadline(self.stream.tcp(), self.until).and_then(|()| attempt(self.stream));
        in_words(outcome, || format!("who calls was not said within {:?}", self.hello_deadline))
    }
}

impl Read for Timed<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.in_time(|stream| stream.read(buffer))
    }
}

/// The stream of a peer that has said who it is. The socket itself keeps the deadline of each call, which is over with
/// the first byte.
struct Steady<'a> {
    stream: &'a mut Stream,
    stall_deadline: Duration,
}

impl<'a> Steady<'a> {
    fn new(stream: &'a mut Stream, stall_deadline: Duration) -> Result<Self> {
        let (tcp, each) = (stream.tcp(), Some(stall_deadline));
        let set = tcp.set_read_timeout(each).and_then(|()| tcp.set_write_timeout(each));
        set.map_err(|e| wire::Error::io("setting the deadline", e))?;
        Ok(Steady { stream, stall_deadline })
    }

    /// Waits for the next request, however long it takes to begin.
    fn next(&mut self, frame: &mut Frame, limits: Limits) -> wire::Result<bool> {
        loop {
            match frame.read(self, limits) {
                Err(wire::Error::Io { source, .. }) if is_late(&source) && !self.stream.is_amid_record() => {}
                outcome => return outcome,
            }
        }
    }

    fn sent<T>(&mut self, attempt: impl FnOnce(&mut Stream) -> io::Result<T>) -> io::Result<T> {
        in_words(attempt(self.stream), || format!("nothing was taken for {:?}", self.stall_deadline))
    }
}

impl Read for Steady<'_> {
    #[inline]
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        in_words(self.stream.read(buffer), || format!("nothing came for {:?}", self.stall_deadline))
    }
}

impl Write for Steady<'_> {
    #[inline]
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        self.sent(|stream| stream.write(buffer))
    }

    fn flush(&mut self) -> io::Result<()> {
        self.sent(Stream::flush)
    }
}

/// Makes the next call of the socket end by `until`.
fn set_deadline(tcp: &TcpStream, until: Instant) -> io::Result<()> {
    let left = until.saturating_duration_since(Instant::now());
    if left.is_zero() {
        return Err(io::ErrorKind::WouldBlock.into());
    }
    tcp.set_read_timeout(Some(left))?;
    tcp.set_write_timeout(Some(left))
}

/// Says what it means that a deadline has passed, where the system only says that it would have to wait.
fn in_words<T>(outcome: io::Result<T>, words: impl FnOnce() -> String) -> io::Result<T> {
    outcome.map_err(|e| match e.kind() {
        io::ErrorKind::WouldBlock => io::Error::new(io::ErrorKind::TimedOut, words()),
        _ => e,
    })
}

/// Whether this is a deadline of ours, in words; what the system says has a number.
fn is_late(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::TimedOut && error.raw_os_error().is_none()
}
