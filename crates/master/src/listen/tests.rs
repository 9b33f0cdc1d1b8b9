#![allow(clippy::disallowed_methods, reason = "certificates are of today")]

use std::time::SystemTime;

use elasticdl_spec::Kind;
use elasticdl_wire::control::{TopologyReply, TopologyRequest};
use elasticdl_wire::{Token, client, tls};
use tokio_rustls::TlsConnector;

use super::*;
use crate::pages::EventLog;
use crate::server::router;

const SECRET: &str = "0123456789abcdef";
const DEADLINE: Duration = Duration::from_secs(20);

fn identity() -> Identity {
    Identity::make(SystemTime::now()).unwrap()
}

fn token() -> Token {
    Token::new(SECRET).unwrap()
}

/// The master's answers over TLS; nobody is behind them, so that they say "ending".
async fn serve(identity: &Identity) -> SocketAddr {
    let secure = Secure::new(TcpListener::bind("127.0.0.1:0").await.unwrap(), identity).unwrap();
    let address = secure.local_addr().unwrap();
    let app = router(token(), mpsc::unbounded_channel().0, EventLog::new(0));
    tokio::spawn(axum::serve(secure, app).into_future());
    address
}

/// A call over gRPC.
async fn call(address: SocketAddr, identity: Option<&Identity>) -> elasticdl_wire::Result<TopologyReply> {
    let mut client = client::connect(&address.to_string(), token(), identity).unwrap();
    let call = client.topology(TopologyRequest::default());
    client::answer("Topology", tokio::time::timeout(DEADLINE, call).await.expect("an answer comes"))
}

/// What is said to bytes sent over any stream.
async fn said(mut stream: impl tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin, bytes: &str) -> String {
    stream.write_all(bytes.as_bytes()).await.unwrap();
    let mut answer = Vec::new();
    // A stranger's connection may be reset.
    let _ = tokio::time::timeout(DEADLINE, stream.read_to_end(&mut answer)).await.expect("it is closed");
    String::from_utf8_lossy(&answer).into_owned()
}

#[tokio::test]
async fn grpc_and_http_are_answered_through_one_port_while_others_do_not_finish_their_handshake() {
    let identity = identity();
    let address = serve(&identity).await;
    let mut slow = Vec::new();
    for _ in 0..20 {
        slow.push(TcpStream::connect(address).await.unwrap());
    }
    let grpc = call(address, Some(&identity)).await.unwrap_err();
    assert_eq!(grpc.to_string(), "call Topology to the master failed: the master is ending");

    let connector = TlsConnector::from(identity.client());
    let stream = TcpStream::connect(address).await.unwrap();
    let stream = connector.connect(tls::server_name(), stream).await.unwrap();
    let request = "GET /v1/status HTTP/1.1\r\nhost: elasticdl\r\nconnection: close\r\n\r\n";
    let answer = said(stream, request).await;
    assert!(answer.starts_with("HTTP/1.1 401 "), "the certificate is no token: {answer}");
    let request = request.replace("host", &format!("authorization: Bearer {SECRET}\r\nhost"));
    let stream = TcpStream::connect(address).await.unwrap();
    let stream = connector.connect(tls::server_name(), stream).await.unwrap();
    let answer = said(stream, &request).await;
    assert!(answer.starts_with("HTTP/1.1 503 ") && answer.contains("the master is ending"), "{answer}");
}

#[tokio::test]
async fn who_has_no_certificate_of_the_job_is_not_answered() {
    let address = serve(&identity()).await;
    let other = call(address, Some(&identity())).await.unwrap_err();
    assert!(
        other.to_string().starts_with("call Topology to the master failed: invalid peer certificate"),
        "{other}"
    );
    assert_eq!(other.kind(), Kind::Retry, "another master may come to this address");
    let plain = call(address, None).await.unwrap_err().to_string();
    assert!(!plain.contains("the master is ending"), "{plain}");
    let plain = TcpStream::connect(address).await.unwrap();
    let request = format!("GET /v1/status HTTP/1.1\r\nauthorization: Bearer {SECRET}\r\n\r\n");
    let answer = said(plain, &request).await;
    assert!(!answer.contains("HTTP"), "{answer:?}");
}

#[tokio::test]
async fn accepting_ends_with_the_listener() {
    let secure = Secure::new(TcpListener::bind("127.0.0.1:0").await.unwrap(), &identity()).unwrap();
    let address = secure.local_addr().unwrap();
    drop(secure);
    let freed = async { while TcpStream::connect(address).await.is_ok() {} };
    tokio::time::timeout(DEADLINE, freed).await.expect("nobody listens any more");
}
