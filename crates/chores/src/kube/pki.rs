//! Keys, certificates and kubeconfigs, made anew for every cluster.

use std::fs;
use std::net::IpAddr;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DistinguishedName, DnType, ExtendedKeyUsagePurpose,
    IsCa, KeyPair, KeyUsagePurpose, SanType,
};
use serde_json::json;

use super::network::{API_SERVICE_IP, CONTROL_IP};
use super::node;
use super::places::{make_directory, write_file};

/// The group whose members may do everything.
const MASTERS: &str = "system:masters";

/// The authority of one cluster and where its papers lie.
pub struct Pki {
    directory: PathBuf,
    authority: CertifiedIssuer<'static, KeyPair>,
}

/// Whom a certificate is for.
struct Subject<'a> {
    name: &'a str,
    group: Option<&'a str>,
    /// Names and addresses under which it serves; none for those who only call.
    serves: &'a [&'a str],
}

impl Pki {
    /// Makes the authority and the papers of the control plane and of `nodes` nodes.
    pub fn make(directory: &Path, nodes: u8) -> Result<()> {
        make_directory(directory)?;
        fs::set_permissions(directory, fs::Permissions::from_mode(0o700))
            .with_context(|| format!("protect {}", directory.display()))?;
        let mut params = params("elasticdl-testcluster", None);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages =
            vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign, KeyUsagePurpose::DigitalSignature];
        let authority =
            CertifiedIssuer::self_signed(params, key()?).context("sign the cluster's authority")?;
        let pki = Pki { directory: directory.to_owned(), authority };
        pki.write("ca.crt", &pki.authority.pem())?;
        pki.write("ca.key", &pki.authority.key().serialize_pem())?;
        // Tokens of service accounts are signed with the one and checked with the other.
        let accounts = key()?;
        pki.write("accounts.key", &accounts.serialize_pem())?;
        pki.write("accounts.pub", &accounts.public_key_pem())?;
        pki.control()?;
        (1..=nodes).try_for_each(|index| pki.node(index))
    }

    fn control(&self) -> Result<()> {
        let serves = [
            "localhost",
            "kubernetes",
            "kubernetes.default",
            "kubernetes.default.svc",
            "127.0.0.1",
            CONTROL_IP,
            API_SERVICE_IP,
        ];
        self.issue("apiserver", &Subject { name: "kube-apiserver", group: None, serves: &serves })?;
        let caller = |name, group| Subject { name, group, serves: &[] };
        self.issue("apiserver-kubelet", &caller("kube-apiserver-kubelet", Some(MASTERS)))?;
        for (file, subject) in [
            ("admin", caller("admin", Some(MASTERS))),
            ("controller-manager", caller("system:kube-controller-manager", None)),
            ("scheduler", caller("system:kube-scheduler", None)),
            ("proxy", caller("system:kube-proxy", None)),
        ] {
            self.issue(file, &subject)?;
            self.config(file)?;
        }
        Ok(())
    }

    fn node(&self, index: u8) -> Result<()> {
        let (name, ip) = (node::name(index), super::network::node_ip(index));
        let user = format!("system:node:{name}");
        self.issue(&name, &Subject { name: &user, group: Some("system:nodes"), serves: &[&name, &ip] })?;
        self.config(&name)
    }

    /// Writes `FILE.crt` and `FILE.key`.
    fn issue(&self, file: &str, subject: &Subject<'_>) -> Result<()> {
        let key = key()?;
        let mut params = params(subject.name, subject.group);
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature, KeyUsagePurpose::KeyEncipherment];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        if !subject.serves.is_empty() {
            params.extended_key_usages.push(ExtendedKeyUsagePurpose::ServerAuth);
        }
        for &served in subject.serves {
            params.subject_alt_names.push(match served.parse::<IpAddr>() {
                Ok(address) => SanType::IpAddress(address),
                Err(_) => SanType::DnsName(served.try_into().context("a DNS name is ASCII")?),
            });
        }
        let certificate = params
            .signed_by(&key, &self.authority)
            .with_context(|| format!("sign the certificate of {}", subject.name))?;
        self.write(&format!("{file}.crt"), &certificate.pem())?;
        self.write(&format!("{file}.key"), &key.serialize_pem())
    }

    /// Writes `FILE.kubeconfig` for the certificate of that name.
    fn config(&self, file: &str) -> Result<()> {
        let path = |name: String| self.directory.join(name);
        let config = json!({
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{ "name": "testcluster", "cluster": {
                "server": format!("https://{CONTROL_IP}:6443"),
                "certificate-authority": path("ca.crt".into()),
            }}],
            "users": [{ "name": file, "user": {
                "client-certificate": path(format!("{file}.crt")),
                "client-key": path(format!("{file}.key")),
            }}],
            "contexts": [{ "name": "testcluster", "context": { "cluster": "testcluster", "user": file } }],
            "current-context": "testcluster",
        });
        self.write(&format!("{file}.kubeconfig"), &format!("{config:#}\n"))
    }

    fn write(&self, file: &str, content: &str) -> Result<()> {
        write_file(&self.directory.join(file), content)
    }
}

fn key() -> Result<KeyPair> {
    KeyPair::generate().context("make a key")
}

fn params(name: &str, group: Option<&str>) -> CertificateParams {
    let mut params = CertificateParams::default();
    params.distinguished_name = DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, name);
    if let Some(group) = group {
        params.distinguished_name.push(DnType::OrganizationName, group);
    }
    params
}
