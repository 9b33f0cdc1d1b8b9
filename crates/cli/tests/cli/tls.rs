//! Jobs whose processes show each other certificates and encrypt what they say.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::time::SystemTime;

use elasticdl_wire::{Identity, Stream};
use rustix::process::Signal;
use ureq::tls::{Certificate, ClientCert, PrivateKey, RootCerts, TlsConfig};

use super::backups::backed_up;
use super::chaos::{audit, counting, every_row_is_right};
use super::moves::{ends_fast, pid, slow};
use super::world::{World, signal, wait_for};

const EPOCHS: u32 = 20;
/// More work than any test waits for; it is stopped.
const ENDLESS: &str =
    "train: { batch: 256, epochs: 100000 }\nservers: { count: 1, partitions: 4 }\nworkers: { count: 1 }";

#[test]
fn an_encrypted_job_ends_exactly_whatever_dies() {
    let (world, file) = counting(EPOCHS, "");
    let mut job = world.start(&["train", &file, "--set", "security.tls=true"]);
    job.until_training();
    let key = world.job_dir("count").join("tls/key.pem");
    let before = fs::read_to_string(&key).unwrap();
    assert_eq!(fs::metadata(&key).unwrap().permissions().mode() & 0o777, 0o600);
    let member = |list: &str| world.status("count")[list][0]["pid"].as_u64().unwrap() as u32;
    signal(member("workers"), Signal::KILL);
    job.until("a new worker", |e| e["event"] == "worker_joined");
    job.until("a checkpoint", |e| e["event"] == "checkpoint");
    signal(member("servers"), Signal::KILL);
    job.until("the server", |e| e["event"] == "server_ready");
    signal(world.master("count").1, Signal::KILL);
    let started = job.until("the next master", |e| e["event"] == "started");
    assert_eq!((&started["term"], &started["adopted"]), (&2.into(), &4.into()));
    job.until("leases of the next master", |e| e["event"] == "leasing");
    let (last, code) = job.end();
    assert_eq!((&last["outcome"], code), (&"done".into(), Some(0)));
    audit(&world, "count");
    every_row_is_right(&world, EPOCHS);
    assert_eq!(fs::read_to_string(&key).unwrap(), before, "a job that goes on keeps its certificate");
}

/// Goal: servers show each other certificates too, where one has the backup of another and where partitions move.
#[test]
fn encrypted_servers_back_each_other_up_and_hand_partitions_over() {
    let (world, mut job) = slow("", &["security.tls=true", "servers.replicas=2"]);
    backed_up(&world);
    world.run(&["scale", "count", "--servers", "3"]).ok();
    job.until("a move", |e| e["event"] == "moved");
    backed_up(&world);
    signal(pid(&world, 0), Signal::KILL);
    let next = job.until("the backups", |e| e["event"] == "promoted" || e["event"] == "replay");
    assert_eq!((&next["event"], &next["from"]), (&"promoted".into(), &0.into()), "{next}");
    assert_eq!(ends_fast(&world, job), 0, "records are trained again");
}

/// A client of people with this certificate, which believes any server.
fn agent(identity: Option<&Identity>) -> ureq::Agent {
    let mut tls = TlsConfig::builder()
        .unversioned_rustls_crypto_provider(elasticdl_wire::tls::provider())
        .disable_verification(true);
    if let Some(identity) = identity {
        let cert = Certificate::from_pem(identity.cert_pem().as_bytes()).unwrap();
        let key = PrivateKey::from_pem(identity.key_pem().as_bytes()).unwrap();
        tls = tls.client_cert(Some(ClientCert::new_with_certs(&[cert], key)));
    }
    let roots = RootCerts::new_with_certs(&[]);
    let config = ureq::Agent::config_builder().http_status_as_error(false).proxy(None);
    config.tls_config(tls.root_certs(roots).build()).build().into()
}

#[test]
fn strangers_get_nothing_from_an_encrypted_job_and_the_logs_say_who_they_were() {
    let world = World::with_data(5_000);
    let file = world.job("ctr", &format!("{ENDLESS}\nsecurity: {{ tls: true }}"));
    let mut job = world.start(&["train", &file]);
    job.until_training();
    let (address, _) = world.master("ctr");
    let token = fs::read_to_string(world.job_dir("ctr").join("token")).unwrap();
    let ours = Identity::read(&world.job_dir("ctr").join("tls")).unwrap();
    let theirs = Identity::make(SystemTime::now()).unwrap();
    let ask = |scheme: &str, identity: Option<&Identity>| {
        let request = agent(identity).get(format!("{scheme}://{address}/v1/status"));
        request.header("authorization", format!("Bearer {token}")).call().map(|answer| answer.status())
    };
    assert_eq!(ask("https", Some(&ours)).unwrap(), 200);
    assert!(ask("http", None).is_err(), "plain, with the token");
    assert!(ask("https", None).is_err(), "encrypted, without a certificate");
    assert!(ask("https", Some(&theirs)).is_err(), "encrypted, with a certificate of another job");

    let log =
        |process: &str| fs::read_to_string(world.job_dir("ctr").join(format!("logs/{process}.log"))).unwrap();
    for who in [
        "the peer does not speak TLS",
        "the peer shows no certificate",
        "the peer's certificate is not of this job",
    ] {
        let told = format!("TLS handshake failed: {who}");
        wait_for(&told, || log("master").contains(&told).then_some(()));
    }
    let server = log("ps-0");
    let server = server.lines().find_map(|line| line.split("address=").nth(1)?.split(' ').next()).unwrap();
    let tcp = std::net::TcpStream::connect(server).unwrap();
    let mut stranger = Stream::connected(tcp, Some(&theirs)).unwrap();
    let refused = loop {
        match stranger.handshake() {
            Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
            outcome => break outcome,
        }
    };
    assert!(refused.is_err());
    let told = "TLS handshake failed: the peer does not take this job's certificate";
    wait_for(told, || log("ps-0").contains(told).then_some(()));

    assert_eq!(world.status("ctr")["phase"], "training", "the job goes on");
    world.run(&["stop", "ctr"]).ok();
    assert_eq!(job.end().0["outcome"], "stopped");

    // Without its certificate the job would go on in the open.
    fs::remove_dir_all(world.job_dir("ctr").join("tls")).unwrap();
    let refused = world.run(&["resume", "ctr"]).failed(1);
    assert!(refused.contains("the job's certificate is gone"), "{refused}");
}

#[test]
fn a_new_run_has_a_new_certificate_or_none() {
    let world = World::with_data(2_000);
    let file = world.job("ctr", "train: { batch: 256 }");
    let key = world.job_dir("ctr").join("tls/key.pem");
    let train = |tls: &str| {
        world.run(&["train", &file, "--json", "--set", &format!("security.tls={tls}")]).ok();
        fs::read_to_string(&key).ok()
    };
    let (first, second) = (train("true").unwrap(), train("true").unwrap());
    assert_ne!(first, second);
    let dir = world.job_dir("ctr");
    let refused = world.run(&["master", "--job-dir", dir.to_str().unwrap()]).failed(1);
    assert!(refused.contains("is to be encrypted (security.tls), and there is no certificate"), "{refused}");
    assert_eq!(train("false"), None);
    assert!(!world.job_dir("ctr").join("tls").exists());
}

#[test]
fn listening_beyond_this_machine_needs_tls() {
    let world = World::with_data(2_000);
    let file = world.job("ctr", "train: { batch: 256 }");
    let refused = world.run(&["train", &file, "--listen", "0.0.0.0:0"]).failed(1);
    assert!(refused.contains("listening beyond this machine needs TLS"), "{refused}");
    assert!(refused.contains("hint: set security.tls to true in the job"), "{refused}");
    let token = world.job_dir("ctr").join("token");
    let args = ["ps", "--master", "127.0.0.1:1", "--id", "0", "--listen", "0.0.0.0:0", "--token-file"];
    let refused = world.run(&[&args[..], &[token.to_str().unwrap()]].concat()).failed(1);
    assert!(refused.contains("listening beyond this machine needs TLS"), "{refused}");
}
