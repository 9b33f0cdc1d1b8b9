#![allow(clippy::disallowed_methods, reason = "certificates are of today, and peers are threads")]

use std::net::TcpListener;
use std::sync::Arc;
use std::sync::mpsc;
use std::time::{Duration, SystemTime};

use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use rustls::{ClientConfig, RootCertStore};

use super::*;
use crate::frame::{Frame, Limits};

const DAY: Duration = Duration::from_secs(24 * 60 * 60);
const PATIENCE: Duration = Duration::from_secs(20);

fn made() -> Identity {
    Identity::make(SystemTime::now()).unwrap()
}

/// Two ends of one connection; neither waits for ever.
fn sockets() -> [TcpStream; 2] {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let ends = [listener.accept().unwrap().0, client];
    for end in &ends {
        end.set_nodelay(true).unwrap();
        end.set_read_timeout(Some(PATIENCE)).unwrap();
    }
    ends
}

fn shake(mut stream: Stream) -> Result<Stream> {
    loop {
        match stream.handshake() {
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            outcome => return outcome.map_err(Error::shaking).map(|()| stream),
        }
    }
}

/// Both sides of a handshake. The client reads a byte, because only then it knows that it was let in.
fn meet(server: Option<&Identity>, client: Option<&Identity>) -> [Result<Stream>; 2] {
    let [accepted, connected] = sockets();
    std::thread::scope(|scope| {
        let server = scope.spawn(move || {
            let mut stream = shake(Stream::accepted(accepted, server)?)?;
            stream.write_all(b"!").and_then(|()| stream.flush()).map_err(Error::shaking)?;
            Ok(stream)
        });
        let mut client = shake(Stream::connected(connected, client).unwrap());
        if let Ok(stream) = &mut client
            && let Err(error) = stream.read_exact(&mut [0])
        {
            client = Err(Error::shaking(error));
        }
        [server.join().unwrap(), client]
    })
}

fn pair(identity: Option<&Identity>) -> [Stream; 2] {
    meet(identity, identity).map(|end| end.unwrap())
}

fn refusals(server: &Identity, client: &Identity) -> [String; 2] {
    meet(Some(server), Some(client)).map(|end| end.unwrap_err().to_string())
}

/// A frame with so many words that count.
fn frame(words: u64) -> Frame {
    let mut frame = Frame::default();
    frame.begin(7, words);
    (0..words).for_each(|word| frame.put(word));
    frame
}

fn arrives(stream: &mut Stream, words: u64) {
    let mut got = Frame::default();
    assert!(got.read(stream, Limits::default()).unwrap());
    assert_eq!((got.kind(), got.request()), (7, words));
    let all = got.payload().take_all(words as usize).unwrap();
    assert!(all.iter().copied().eq(0..words), "{words} words came as they were sent");
}

#[test]
fn frames_of_any_size_arrive_and_the_end_between_two_of_them_is_no_error() {
    let identity = made();
    for identity in [None, Some(&identity)] {
        let [mut server, mut client] = pair(identity);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for words in [0, 1, 2047, 100_000, 3] {
                    arrives(&mut server, words);
                    frame(words).write(&mut server).unwrap();
                }
                assert!(!server.is_amid_record(), "all of the last one was read");
                assert!(!Frame::default().read(&mut server, Limits::default()).unwrap());
            });
            for words in [0, 1, 2047, 100_000, 3] {
                frame(words).write(&mut client).unwrap();
                arrives(&mut client, words);
            }
            client.finish().unwrap();
        });
    }
}

#[test]
fn a_stream_that_is_cut_off_without_a_goodbye_is_an_error() {
    let [mut server, client] = pair(Some(&made()));
    drop(client);
    let error = Frame::default().read(&mut server, Limits::default()).unwrap_err();
    assert!(error.chain().contains("close_notify"), "{}", error.chain());
}

/// Goal: a peer that keeps silent is told from one that stops in the middle, also where a whole record came before.
#[test]
fn a_record_that_has_begun_is_noticed_though_nothing_of_it_can_be_read() {
    let [mut server, mut client] = pair(Some(&made()));
    server.tcp().set_read_timeout(Some(Duration::from_millis(20))).unwrap();
    frame(300).write(&mut client).unwrap();
    let mut got = Frame::default();
    let mut silent = |server: &mut Stream| {
        let error = got.read(server, Limits::default()).unwrap_err();
        matches!(error, Error::Io { source, .. } if source.kind() == ErrorKind::WouldBlock)
    };
    arrives(&mut server, 300);
    assert!(silent(&mut server) && !server.is_amid_record());
    // A header in two pieces, then some of what it announces.
    for bytes in [&[0x17, 3, 3, 0][..], &[40], &[7; 39]] {
        client.tcp().write_all(bytes).unwrap();
        assert!(silent(&mut server) && server.is_amid_record(), "{bytes:?}");
    }
    let [mut server, mut client] = pair(Some(&made()));
    server.tcp().set_read_timeout(Some(Duration::from_millis(20))).unwrap();
    frame(300).write(&mut client).unwrap();
    client.tcp().write_all(&[0x17, 3, 3, 0, 40]).unwrap();
    arrives(&mut server, 300);
    assert!(silent(&mut server) && server.is_amid_record());
}

#[test]
fn a_certificate_of_another_job_is_believed_by_neither_side() {
    let [server, client] = refusals(&made(), &made());
    assert_eq!(client, "TLS handshake failed: the peer's certificate is not of this job");
    assert_eq!(server, "TLS handshake failed: the peer does not take this job's certificate");
}

#[test]
fn a_certificate_counts_in_its_time_only() {
    let [long_ago, soon] = [SystemTime::now() - DAY * 3660, SystemTime::now() + DAY * 2];
    for time in [long_ago, soon] {
        let identity = Identity::make(time).unwrap();
        let [_, client] = refusals(&identity, &identity);
        assert_eq!(client, "TLS handshake failed: the peer's certificate is not of this job");
    }
    let almost_over = Identity::make(SystemTime::now() - DAY * 3649).unwrap();
    pair(Some(&almost_over));
}

/// A client that knows the job's authority and has no certificate of its own.
fn stranger(identity: &Identity, tcp: TcpStream) -> Stream {
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_slice(identity.ca_pem().as_bytes()).unwrap()).unwrap();
    let config = ClientConfig::builder_with_provider(tls::provider());
    let config = config.with_safe_default_protocol_versions().unwrap();
    let config = config.with_root_certificates(roots).with_no_client_auth();
    let side = ClientConnection::new(Arc::new(config), tls::server_name()).unwrap();
    Stream::Tls(Box::new(Tls::new(side.into(), tcp)))
}

#[test]
fn a_client_without_a_certificate_is_told_so() {
    let identity = made();
    let [accepted, connected] = sockets();
    std::thread::scope(|scope| {
        let server = scope.spawn(|| shake(Stream::accepted(accepted, Some(&identity))?));
        let mut client = shake(stranger(&identity, connected)).unwrap();
        let refused = server.join().unwrap().unwrap_err();
        assert_eq!(refused.to_string(), "TLS handshake failed: the peer shows no certificate");
        let error = Error::shaking(client.read_exact(&mut [0]).unwrap_err());
        assert!(error.chain().ends_with("CertificateRequired"), "{}", error.chain());
    });
}

#[test]
fn who_does_not_speak_tls_is_recognised_on_either_side() {
    let identity = made();
    let [mut plain, connected] = sockets();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            frame(4).write(&mut plain).unwrap();
            let _ = plain.read(&mut [0; 512]);
        });
        let error = shake(Stream::connected(connected, Some(&identity)).unwrap()).unwrap_err();
        assert_eq!(error.to_string(), "TLS handshake failed: the peer does not speak TLS");
    });
    let [accepted, mut plain] = sockets();
    frame(4).write(&mut plain).unwrap();
    let error = shake(Stream::accepted(accepted, Some(&identity)).unwrap()).unwrap_err();
    assert_eq!(error.to_string(), "TLS handshake failed: the peer does not speak TLS");
}

/// Long connections change their keys by themselves, after some hundred gigabytes.
#[test]
fn keys_may_change_between_frames() {
    let [mut server, mut client] = pair(Some(&made()));
    let Stream::Tls(tls) = &mut client else { panic!("it is encrypted") };
    tls.connection.refresh_traffic_keys().unwrap();
    for _ in 0..3 {
        frame(5000).write(&mut client).unwrap();
        arrives(&mut server, 5000);
        frame(5000).write(&mut server).unwrap();
        arrives(&mut client, 5000);
    }
}

/// A peer that does not read makes writes time out. What was sent by then must not be sent twice.
#[test]
fn a_write_that_timed_out_goes_on_where_it_was() {
    let identity = made();
    for identity in [None, Some(&identity)] {
        let [mut server, client] = pair(identity);
        client.tcp().set_write_timeout(Some(Duration::from_millis(20))).unwrap();
        let (blocked, blocks) = mpsc::channel();
        let mut patient = Patient { stream: client, blocked };
        std::thread::scope(|scope| {
            scope.spawn(move || {
                blocks.recv_timeout(PATIENCE).expect("the sockets fill up");
                arrives(&mut server, 1 << 21);
                arrives(&mut server, 1);
            });
            frame(1 << 21).write(&mut patient).unwrap();
            frame(1).write(&mut patient).unwrap();
        });
    }
}

/// Tries again, and tells the first time.
struct Patient {
    stream: Stream,
    blocked: mpsc::Sender<()>,
}

impl Patient {
    fn retry<T>(&mut self, mut attempt: impl FnMut(&mut Stream) -> io::Result<T>) -> io::Result<T> {
        loop {
            match attempt(&mut self.stream) {
                Err(e) if e.kind() == ErrorKind::WouldBlock => drop(self.blocked.send(())),
                outcome => return outcome,
            }
        }
    }
}

impl Write for Patient {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        self.retry(|stream| stream.write(buffer))
    }

    fn flush(&mut self) -> io::Result<()> {
        self.retry(|stream| stream.flush())
    }
}
