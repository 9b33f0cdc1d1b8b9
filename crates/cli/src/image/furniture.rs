//! What an image holds around its program: users, a place for temporary files, certificates.

use std::path::{Path, PathBuf};

use super::USER;
use super::layer::{Contents, Node, Source};

/// The home and working directory. Anybody may write there, since clusters pick users of their own.
pub const HOME: &str = "/home/elasticdl";

/// Where an image has the certificates; TLS libraries look there.
const CERTIFICATES: &str = "/etc/ssl/certs/ca-certificates.crt";
/// Where systems keep theirs: Debian and Arch, Fedora, SUSE, Alpine.
const CERTIFICATE_PLACES: [&str; 4] =
    [CERTIFICATES, "/etc/pki/tls/certs/ca-bundle.crt", "/etc/ssl/ca-bundle.pem", "/etc/ssl/cert.pem"];

/// Everything around a program.
pub fn contents() -> Contents {
    let mut contents = Contents::default();
    let text = |text: String| Node::File { source: Source::Bytes(text.into()), executable: false };
    let passwd =
        format!("root:x:0:0:root:/:/bin/false\nelasticdl:x:{USER}:{USER}:elasticdl:{HOME}:/bin/false\n");
    contents.insert(Path::new("/etc/passwd"), text(passwd));
    contents.insert(Path::new("/etc/group"), text(format!("root:x:0:\nelasticdl:x:{USER}:\n")));
    // Without it glibc would ask the network for names that stand in /etc/hosts.
    contents.insert(Path::new("/etc/nsswitch.conf"), text("hosts: files dns\n".into()));
    contents.insert(Path::new("/tmp"), Node::Directory { mode: 0o1777 });
    contents.insert(Path::new(HOME), Node::Directory { mode: 0o1777 });
    if let Some(path) = certificates() {
        contents
            .insert(Path::new(CERTIFICATES), Node::File { source: Source::Disk(path), executable: false });
    }
    contents
}

/// The certificates of the authorities that this machine trusts, where it has a file of them.
pub fn certificates() -> Option<PathBuf> {
    CERTIFICATE_PLACES.map(PathBuf::from).into_iter().find(|path| path.is_file())
}
