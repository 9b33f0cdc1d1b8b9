//! A connection that carries frames: plain TCP, or TLS over it.
//!
//! One read here is at most one read of the socket, so that whoever sets the socket's timeouts keeps a
//! deadline however slowly the bytes drip in. Where that one read does not make a whole TLS record, the
//! answer is `Interrupted`, which means "once more" to everybody who reads. Nothing is sent for certain
//! before `flush`. Who wants to end a connection from another thread shuts its socket down.

use std::io::{self, BufReader, ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};

use rustls::{ClientConnection, Connection, ServerConnection};

use crate::error::{Error, Result};
use crate::tls::{self, Identity};

/// What one read of the socket takes at most: rustls by itself would ask for a quarter of a record.
const READ_BYTES: usize = 64 << 10;

/// An open connection.
#[derive(Debug)]
pub enum Stream {
    /// Anybody on the way can read it. For loopback.
    Plain(TcpStream),
    /// Only processes of the job can.
    Tls(Box<Tls>),
}

impl Stream {
    /// The side that was called; plain without an identity. Nothing is sent or received yet.
    pub fn accepted(tcp: TcpStream, identity: Option<&Identity>) -> Result<Self> {
        let Some(identity) = identity else { return Ok(Stream::Plain(tcp)) };
        let side = ServerConnection::new(identity.server()).map_err(|source| Error::Handshake { source })?;
        Ok(Stream::Tls(Box::new(Tls::new(side.into(), tcp))))
    }

    /// The side that called; plain without an identity. Nothing is sent or received yet.
    pub fn connected(tcp: TcpStream, identity: Option<&Identity>) -> Result<Self> {
        let Some(identity) = identity else { return Ok(Stream::Plain(tcp)) };
        let side = ClientConnection::new(identity.client(), tls::server_name());
        let side = side.map_err(|source| Error::Handshake { source })?;
        Ok(Stream::Tls(Box::new(Tls::new(side.into(), tcp))))
    }

    /// The socket below, for its timeouts.
    pub fn tcp(&self) -> &TcpStream {
        match self {
            Stream::Plain(tcp) => tcp,
            Stream::Tls(tls) => tls.tcp.socket.get_ref(),
        }
    }

    /// Whether a part of a TLS record has come, of which nobody can read anything yet. Without TLS nothing is kept back.
    pub fn is_amid_record(&self) -> bool {
        match self {
            Stream::Plain(_) => false,
            Stream::Tls(tls) => !tls.tcp.is_between(),
        }
    }

    /// Finds out whether the peer is of this job; a plain stream asks nobody. `Interrupted`: not known yet,
    /// once more. What [`Error::shaking`] makes of other errors says who is to blame.
    ///
    /// A client is done before the server has looked at its certificate: a refusal comes with the first read.
    pub fn handshake(&mut self) -> io::Result<()> {
        match self {
            Stream::Plain(_) => Ok(()),
            Stream::Tls(tls) => tls.handshake(),
        }
    }

    /// Says that nothing more will be sent; the peer may still send.
    pub fn finish(&mut self) -> io::Result<()> {
        if let Stream::Tls(tls) = self {
            tls.connection.send_close_notify();
            tls.send()?;
        }
        self.tcp().shutdown(Shutdown::Write)
    }
}

impl Read for Stream {
    #[inline]
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match self {
            Stream::Plain(tcp) => tcp.read(buffer),
            Stream::Tls(tls) => tls.read(buffer),
        }
    }
}

impl Write for Stream {
    #[inline]
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        match self {
            Stream::Plain(tcp) => tcp.write(buffer),
            Stream::Tls(tls) => tls.write(buffer),
        }
    }

    #[inline]
    fn flush(&mut self) -> io::Result<()> {
        match self {
            Stream::Plain(tcp) => tcp.flush(),
            Stream::Tls(tls) => tls.send(),
        }
    }
}

/// TLS over a socket, one thread at a time.
#[derive(Debug)]
pub struct Tls {
    connection: Connection,
    tcp: Records,
}

impl Tls {
    fn new(connection: Connection, tcp: TcpStream) -> Self {
        Tls { connection, tcp: Records::new(tcp) }
    }

    fn handshake(&mut self) -> io::Result<()> {
        self.send()?;
        if self.connection.is_handshaking() {
            self.receive()?;
            self.send()?;
        }
        if self.connection.is_handshaking() { Err(ErrorKind::Interrupted.into()) } else { Ok(()) }
    }

    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match self.connection.reader().read(buffer) {
            Err(e) if e.kind() == ErrorKind::WouldBlock => {}
            outcome => return outcome,
        }
        self.receive()?;
        match self.connection.reader().read(buffer) {
            Err(e) if e.kind() == ErrorKind::WouldBlock => Err(ErrorKind::Interrupted.into()),
            outcome => outcome,
        }
    }

    /// Takes as much as there is room for, once what was taken before is gone.
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        self.send()?;
        self.connection.writer().write(buffer)
    }

    /// Reads the socket once and decrypts what is complete.
    fn receive(&mut self) -> io::Result<()> {
        if self.connection.read_tls(&mut self.tcp)? == 0 && self.connection.is_handshaking() {
            return Err(ErrorKind::UnexpectedEof.into());
        }
        match self.connection.process_new_packets() {
            Ok(_) => Ok(()),
            Err(error) => {
                // The peer is told why, if it still listens.
                let _ = self.send();
                Err(io::Error::new(ErrorKind::InvalidData, error))
            }
        }
    }

    /// Sends what is encrypted. It keeps its place: after an error that may pass it goes on from there.
    fn send(&mut self) -> io::Result<()> {
        while self.connection.wants_write() {
            match self.connection.write_tls(&mut self.tcp.socket.get_ref()) {
                Ok(0) => return Err(ErrorKind::WriteZero.into()),
                Ok(_) => {}
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
        Ok(())
    }
}

/// What comes from a socket, and where in a TLS record it stands: rustls does not tell whether it waits for the rest
/// of one. A record begins with five bytes, the last two of which say how many follow.
#[derive(Debug)]
struct Records {
    socket: BufReader<TcpStream>,
    header: [u8; 5],
    /// Bytes of the header that have come, and of what it announces those that have not.
    begun: usize,
    left: usize,
}

impl Records {
    fn new(tcp: TcpStream) -> Self {
        let socket = BufReader::with_capacity(READ_BYTES, tcp);
        Records { socket, header: [0; 5], begun: 0, left: 0 }
    }

    fn is_between(&self) -> bool {
        self.begun == 0 && self.left == 0
    }

    fn pass(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            if self.left > 0 {
                let passed = self.left.min(bytes.len());
                self.left -= passed;
                bytes = &bytes[passed..];
                continue;
            }
            let taken = (self.header.len() - self.begun).min(bytes.len());
            self.header[self.begun..][..taken].copy_from_slice(&bytes[..taken]);
            self.begun += taken;
            bytes = &bytes[taken..];
            if self.begun == self.header.len() {
                self.begun = 0;
                self.left = u16::from_be_bytes([self.header[3], self.header[4]]).into();
            }
        }
    }
}

impl Read for Records {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.socket.read(buffer)?;
        self.pass(&buffer[..count]);
        Ok(count)
    }
}

#[cfg(test)]
mod tests;
