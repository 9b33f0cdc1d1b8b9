#![allow(clippy::disallowed_methods, reason = "certificates are of today")]

use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;

use super::*;

fn made() -> Identity {
    Identity::make(SystemTime::now()).unwrap()
}

fn mode(path: &Path) -> u32 {
    fs::metadata(path).unwrap().permissions().mode() & 0o777
}

fn set_mode(path: &Path, mode: u32) {
    fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
}

#[test]
fn an_identity_survives_its_directory_and_a_new_one_takes_its_place() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("job/tls");
    let (first, second) = (made(), made());
    assert_ne!(first.key_pem(), second.key_pem());
    for identity in [&first, &second] {
        identity.write(&dir).unwrap();
        assert_eq!((mode(&dir), mode(&dir.join("key.pem"))), (0o700, 0o600));
        let read = Identity::read(&dir).unwrap();
        assert_eq!(
            (read.ca_pem(), read.cert_pem(), read.key_pem()),
            (identity.ca_pem(), identity.cert_pem(), identity.key_pem())
        );
    }
    let mut files: Vec<_> = fs::read_dir(&dir).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    files.sort();
    assert_eq!(files, ["ca.pem", "cert.pem", "key.pem"], "the authority's key is nowhere");
}

#[test]
fn a_mounted_secret_is_read_through_its_links_unless_others_can_read_the_key() {
    let root = tempfile::tempdir().unwrap();
    let (data, mount) = (root.path().join("..data"), root.path().join("mount"));
    made().write(&data).unwrap();
    fs::create_dir(&mount).unwrap();
    for name in ["ca.pem", "cert.pem", "key.pem"] {
        symlink(data.join(name), mount.join(name)).unwrap();
    }
    for allowed in [0o400, 0o440, 0o600] {
        set_mode(&data.join("key.pem"), allowed);
        assert!(Identity::read(&mount).is_ok(), "{allowed:o}");
    }
    for open in [0o444, 0o644] {
        set_mode(&data.join("key.pem"), open);
        let error = Identity::read(&mount).unwrap_err();
        assert!(error.to_string().contains(&format!("others can read it (mode {open:o})")), "{error}");
        assert_eq!(error.kind(), elasticdl_spec::Kind::User);
    }
}

#[test]
fn nothing_is_written_where_others_can_look() {
    let root = tempfile::tempdir().unwrap();
    set_mode(root.path(), 0o755);
    let error = made().write(root.path()).unwrap_err().to_string();
    assert!(error.contains("others can enter it (mode 755)"), "{error}");
    assert_eq!(fs::read_dir(root.path()).unwrap().count(), 0);
}

#[test]
fn texts_that_do_not_belong_together_are_no_identity() {
    let (ours, other) = (made(), made());
    let from = |ca: &str, cert: &str, key: &str| Identity::from_pem(ca.into(), cert.into(), key.into());
    assert!(from(ours.ca_pem(), ours.cert_pem(), ours.key_pem()).is_ok());
    for (ca, cert, key, expected) in [
        (ours.ca_pem(), ours.cert_pem(), other.key_pem(), "KeyMismatch"),
        ("", ours.cert_pem(), ours.key_pem(), "the authority: there is none in the text"),
        (ours.ca_pem(), "nonsense", ours.key_pem(), "the certificate: there is none in the text"),
        (ours.ca_pem(), ours.cert_pem(), "", "the key: "),
    ] {
        let error = from(ca, cert, key).unwrap_err().to_string();
        assert!(error.starts_with("cannot use the job's certificate: "), "{error}");
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn a_missing_file_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let error = Identity::read(dir.path()).unwrap_err().to_string();
    assert!(error.contains("key.pem: No such file"), "{error}");
}

#[test]
fn the_key_does_not_show() {
    assert_eq!(format!("{:?}", made()), "Identity(hidden)");
}

#[test]
fn listening_beyond_this_machine_takes_an_identity() {
    let identity = made();
    for local in ["127.0.0.1:80", "127.8.0.1:0", "[::1]:80", "[::ffff:127.0.0.1]:80"] {
        assert!(may_listen(local.parse().unwrap(), None).is_ok(), "{local}");
    }
    for open in ["0.0.0.0:80", "10.1.2.3:80", "[::]:0", "[::ffff:10.1.2.3]:80"] {
        let error = may_listen(open.parse().unwrap(), None).unwrap_err();
        let expected = format!("not listening at {open}: listening beyond this machine needs TLS");
        assert_eq!((error.to_string(), error.kind()), (expected, elasticdl_spec::Kind::User));
        assert!(may_listen(open.parse().unwrap(), Some(&identity)).is_ok());
    }
}
