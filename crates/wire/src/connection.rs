//! One connection to one server, a worker's or another server's: opened with the token, over TLS with the job's certificate, then a request and
//! its answer at a time.
//!
//! While the peer is merely slow, whoever waits is asked now and then whether to go on waiting. A connection over which
//! nothing comes for minutes may be one that only this end knows of: it is given up, and what was asked is to be asked
//! again over another one.

use std::io::{ErrorKind, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::time::Duration;

use crate::auth::Token;
use crate::error::{Error, Result};
use crate::frame::{Frame, Limits};
use crate::ps::{self, kind};
use crate::stream::Stream;
use crate::tls::Identity;

const CONNECT_DEADLINE: Duration = Duration::from_secs(2);
/// How often a wait for the peer is questioned.
const PATIENCE: Duration = Duration::from_millis(500);
/// For so long nothing comes, or is taken, at most. Whoever answers late has its reasons, but none takes that long: a
/// server waits a minute for its backups.
const SILENCE_MAX: Duration = Duration::from_secs(150);
/// The same in questions.
const QUESTIONS_MAX: u32 = (SILENCE_MAX.as_millis() / PATIENCE.as_millis()) as u32;

/// Who opens a connection.
#[derive(Debug, Clone)]
pub struct Caller {
    /// The job's token.
    pub token: Token,
    /// The job's certificate; plain without one.
    pub identity: Option<Identity>,
    /// Who it is.
    pub who: Who,
}

/// Who talks to a server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Who {
    /// The worker of this number.
    Worker(u32),
    /// The server of this number.
    Server(u32),
}

impl Who {
    /// Its word in a HELLO.
    pub fn word(self) -> u64 {
        match self {
            Who::Worker(number) => number.into(),
            Who::Server(number) => 1 << 32 | u64::from(number),
        }
    }

    /// Who has this word.
    pub fn from_word(word: u64) -> Result<Self> {
        let number = word as u32;
        match word >> 32 {
            0 => Ok(Who::Worker(number)),
            1 => Ok(Who::Server(number)),
            _ => Err(Error::Malformed(format!("a caller whose word is {word:#x}"))),
        }
    }
}

impl std::fmt::Display for Who {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Who::Worker(number) => write!(f, "worker-{number}"),
            Who::Server(number) => write!(f, "ps-{number}"),
        }
    }
}

/// An open connection, with the frames that go over it.
#[derive(Debug)]
pub struct Connection {
    stream: Stream,
    /// To be filled with the next request.
    pub out: Frame,
    /// The last answer.
    pub answer: Frame,
}

impl Connection {
    /// Connects and says hello.
    pub fn open(address: &str, caller: &Caller, keep_waiting: &mut dyn FnMut() -> bool) -> Result<Self> {
        let failed = |e| Error::io(format!("connecting to the server at {address}"), e);
        let target = address.to_socket_addrs().map_err(failed)?.next();
        let target = target.ok_or_else(|| failed(ErrorKind::AddrNotAvailable.into()))?;
        let tcp = TcpStream::connect_timeout(&target, CONNECT_DEADLINE).map_err(failed)?;
        tcp.set_nodelay(true).map_err(failed)?;
        tcp.set_read_timeout(Some(PATIENCE)).map_err(failed)?;
        tcp.set_write_timeout(Some(PATIENCE)).map_err(failed)?;
        let mut stream = Stream::connected(tcp, caller.identity.as_ref())?;
        // A server that is still loading does not answer this yet; it is waited for like any other answer.
        let shaken = Patient::new(&mut stream, keep_waiting).retry(Stream::handshake);
        shaken.map_err(Error::shaking)?;
        let mut connection = Connection { stream, out: Frame::default(), answer: Frame::default() };
        ps::hello(&mut connection.out, caller.token.secret(), caller.who);
        connection.send(keep_waiting)?;
        match connection.receive(kind::WELCOME, 0, keep_waiting) {
            // The master has our token, so this is not our server: its port belongs to somebody else by
            // now. The topology will say where ours went.
            Err(Error::Refused(reason)) => Err(failed(std::io::Error::other(reason))),
            outcome => outcome.map(|()| connection),
        }
    }

    /// Sends what was put into `out`.
    pub fn send(&mut self, keep_waiting: &mut dyn FnMut() -> bool) -> Result<()> {
        let mut patient = Patient::new(&mut self.stream, keep_waiting);
        self.out.write(&mut patient).map_err(|e| Error::io("sending to a server", e))
    }

    /// Waits for the answer to `request`; it is then in `answer`.
    pub fn receive(&mut self, kind: u32, request: u64, keep_waiting: &mut dyn FnMut() -> bool) -> Result<()> {
        let mut patient = Patient::new(&mut self.stream, keep_waiting);
        if !self.answer.read(&mut patient, Limits::default())? {
            return Err(Error::io("waiting for a server's answer", ErrorKind::UnexpectedEof.into()));
        }
        ps::expect(&self.answer, kind, request)
    }
}

/// A stream that asks whether to go on when the peer lets it wait, and keeps its place if so.
struct Patient<'a> {
    stream: &'a mut Stream,
    keep_waiting: &'a mut dyn FnMut() -> bool,
    questions_max: u32,
}

impl<'a> Patient<'a> {
    fn new(stream: &'a mut Stream, keep_waiting: &'a mut dyn FnMut() -> bool) -> Self {
        Patient { stream, keep_waiting, questions_max: QUESTIONS_MAX }
    }

    fn retry<T>(&mut self, mut attempt: impl FnMut(&mut Stream) -> std::io::Result<T>) -> std::io::Result<T> {
        let mut questions = 0;
        loop {
            match attempt(self.stream) {
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                    questions += 1;
                    if questions > self.questions_max || !(self.keep_waiting)() {
                        return Err(ErrorKind::TimedOut.into());
                    }
                }
                outcome => return outcome,
            }
        }
    }
}

impl Read for Patient<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        self.retry(|stream| stream.read(buffer))
    }
}

impl Write for Patient<'_> {
    fn write(&mut self, buffer: &[u8]) -> std::io::Result<usize> {
        self.retry(|stream| stream.write(buffer))
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.retry(Stream::flush)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: an answer that never comes is not waited for for ever, and one that comes bit by bit is.
    #[test]
    fn silence_ends_a_wait_and_whoever_goes_on_is_waited_for() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let tcp = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        tcp.set_read_timeout(Some(Duration::from_millis(5))).unwrap();
        let (mut peer, _) = listener.accept().unwrap();
        let (mut stream, mut asked) = (Stream::connected(tcp, None).unwrap(), 0);
        let mut keep_waiting = || {
            asked += 1;
            if asked % 3 == 0 && asked < 30 {
                peer.write_all(&[1]).unwrap();
            }
            true
        };
        let mut patient = Patient { questions_max: 20, ..Patient::new(&mut stream, &mut keep_waiting) };
        let failed = patient.read_exact(&mut [0; 20]).unwrap_err();
        assert_eq!(failed.kind(), ErrorKind::TimedOut);
        // Nine bytes came, each after three questions; then nothing did.
        assert_eq!(asked, 27 + 20);
        assert_eq!(Error::io("waiting for a server's answer", failed).kind(), elasticdl_spec::Kind::Retry);
    }

    #[test]
    fn whoever_calls_is_told_by_his_word() {
        for who in [Who::Worker(0), Who::Worker(u32::MAX), Who::Server(0), Who::Server(7)] {
            assert_eq!(Who::from_word(who.word()).unwrap(), who);
        }
        assert!(Who::from_word(2 << 32).is_err());
        assert_eq!(format!("{} {}", Who::Worker(3), Who::Server(3)), "worker-3 ps-3");
    }
}
