//! SIGTERM ends a server in order. Alone in its binary: a signal reaches the whole process.

#![allow(clippy::unwrap_used, reason = "a test may fail by panic, in its helpers too")]

use elasticdl_ps::{Config, run};
use elasticdl_spec::ServerId;
use elasticdl_wire::Token;

#[tokio::test]
async fn sigterm_ends_a_server_in_order() {
    let master = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let server = tokio::spawn(run(Config {
        master: master.local_addr().unwrap().to_string(),
        token: Token::new("0123456789abcdef").unwrap(),
        identity: None,
        id: ServerId(0),
        process: std::process::id(),
        listen: "127.0.0.1:0".into(),
    }));
    // It calls the master only once it listens for signals.
    let _calling = master.accept().await.unwrap();
    rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::TERM).unwrap();
    let ended = tokio::time::timeout(std::time::Duration::from_secs(20), server).await;
    ended.expect("it ends").unwrap().unwrap();
}
