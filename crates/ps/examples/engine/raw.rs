//! What is to be compared with: bytes over a loopback connection, and bytes to a disk, with nothing around them.

#![expect(clippy::disallowed_methods, reason = "a benchmark reads the clock")]

use std::fs::File;
use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::thread::Builder;
use std::time::Instant;

use elasticdl_spec::mix::Rng;

/// Bytes of one write to a disk.
const BLOCK: usize = 8 << 20;

/// A connection whose other end, a thread of its own, sends as many bytes as it is asked for.
pub struct Raw {
    stream: TcpStream,
    buffer: Vec<u8>,
}

impl Raw {
    /// Writes and reads go up to `block` bytes at a time.
    pub fn connect(block: usize) -> io::Result<Raw> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let stream = TcpStream::connect(listener.local_addr()?)?;
        let (sender, _) = listener.accept()?;
        Builder::new().name("raw-sender".into()).spawn(move || send(sender, block))?;
        stream.set_nodelay(true)?;
        Ok(Raw { stream, buffer: vec![0; block] })
    }

    /// Bytes a second, of so many.
    pub fn receive(&mut self, bytes: usize) -> io::Result<f64> {
        let start = Instant::now();
        self.stream.write_all(&(bytes as u64).to_le_bytes())?;
        let mut left = bytes;
        while left > 0 {
            let room = left.min(self.buffer.len());
            match self.stream.read(&mut self.buffer[..room])? {
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                count => left -= count,
            }
        }
        Ok(bytes as f64 / start.elapsed().as_secs_f64())
    }
}

/// Serves requests until the connection ends.
fn send(mut stream: TcpStream, block: usize) -> io::Result<()> {
    let buffer = vec![1u8; block];
    loop {
        let mut asked = [0; 8];
        stream.read_exact(&mut asked)?;
        let mut left = u64::from_le_bytes(asked) as usize;
        while left > 0 {
            let count = left.min(block);
            stream.write_all(&buffer[..count])?;
            left -= count;
        }
    }
}

/// Seconds to write so many bytes to a new file and to make them durable.
pub fn write(path: &Path, bytes: u64) -> io::Result<f64> {
    let mut rng = Rng::new(5);
    // Nothing that a disk could take for empty, or make smaller.
    let block: Vec<u8> = (0..BLOCK / 8).flat_map(|_| rng.below(u64::MAX).to_le_bytes()).collect();
    let start = Instant::now();
    let mut file = File::create(path)?;
    let mut left = bytes;
    while left > 0 {
        let count = left.min(block.len() as u64);
        file.write_all(&block[..count as usize])?;
        left -= count;
    }
    file.sync_all()?;
    Ok(start.elapsed().as_secs_f64())
}
