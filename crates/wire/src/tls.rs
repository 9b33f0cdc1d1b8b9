//! The job's certificate: who may speak to its processes, and who they may believe.
//!
//! The job is the unit of trust. At submit an authority is made that signs one certificate and is then
//! forgotten: its key is never written. All processes of the job share that certificate, as a server's and as
//! a client's, so whoever shows it is of the job and nobody else is. It is for a name, [`NAME`], and not for
//! addresses: pods come and go.

mod files;
mod guard;
#[cfg(test)]
mod tests;

use std::fmt;
use std::sync::{Arc, LazyLock};
use std::time::{Duration, SystemTime};

use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa, KeyPair,
    KeyUsagePurpose,
};
use rustls::client::Resumption;
use rustls::crypto::{CryptoProvider, ring};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::server::WebPkiClientVerifier;
use rustls::version::TLS13;
use rustls::{ClientConfig, ConfigBuilder, ConfigSide, RootCertStore, ServerConfig, WantsVerifier};

use crate::error::{Error, Result};

pub use guard::may_listen;
pub(crate) use guard::too_open;

/// The name that the job's certificate is for, whatever the address.
pub const NAME: &str = "elasticdl";

const DAY: Duration = Duration::from_secs(24 * 60 * 60);
/// The certificate is for one job, and nobody could renew it while the job runs.
const LIFE: Duration = DAY.saturating_mul(3650);

/// A job's authority, certificate and private key, checked to belong together; cheap to clone.
///
/// The key never shows in logs: `Debug` hides it.
#[derive(Clone)]
pub struct Identity(Arc<Inner>);

struct Inner {
    ca_pem: String,
    cert_pem: String,
    key_pem: String,
    server: Arc<ServerConfig>,
    client: Arc<ClientConfig>,
}

impl Identity {
    /// Makes an authority and a certificate signed by it, and forgets the authority's key. Valid from a day
    /// before `now`, because clocks differ, and for ten years.
    pub fn make(now: SystemTime) -> Result<Self> {
        let failed =
            |e: rcgen::Error| Error::Identity { what: "a new certificate".into(), reason: e.to_string() };
        let authority = CertifiedIssuer::self_signed(authority(now), KeyPair::generate().map_err(failed)?);
        let authority = authority.map_err(failed)?;
        let key = KeyPair::generate().map_err(failed)?;
        let cert = leaf(now).and_then(|params| params.signed_by(&key, &authority)).map_err(failed)?;
        Identity::from_pem(authority.pem(), cert.pem(), key.serialize_pem())
    }

    /// An identity from its three texts, as a Kubernetes Secret carries them.
    pub fn from_pem(ca_pem: String, cert_pem: String, key_pem: String) -> Result<Self> {
        let (server, client) = configs(&ca_pem, &cert_pem, &key_pem)
            .map_err(|reason| Error::Identity { what: "the job's certificate".into(), reason })?;
        Ok(Identity(Arc::new(Inner { ca_pem, cert_pem, key_pem, server, client })))
    }

    /// The authority's certificate, as PEM.
    pub fn ca_pem(&self) -> &str {
        &self.0.ca_pem
    }

    /// The job's certificate, as PEM.
    pub fn cert_pem(&self) -> &str {
        &self.0.cert_pem
    }

    /// The certificate's private key, as PEM: the secret.
    pub fn key_pem(&self) -> &str {
        &self.0.key_pem
    }

    /// For a server: only who shows a certificate of the job is let in.
    pub fn server(&self) -> Arc<ServerConfig> {
        Arc::clone(&self.0.server)
    }

    /// For a server that speaks these protocols (ALPN), the first that the client knows too.
    pub fn server_of(&self, protocols: &[&[u8]]) -> Arc<ServerConfig> {
        let mut config = ServerConfig::clone(&self.0.server);
        config.alpn_protocols = protocols.iter().map(|name| name.to_vec()).collect();
        Arc::new(config)
    }

    /// For a client: believes only who shows a certificate of the job, and shows its own.
    pub fn client(&self) -> Arc<ClientConfig> {
        Arc::clone(&self.0.client)
    }
}

impl fmt::Debug for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Identity(hidden)")
    }
}

/// The cryptography in use. Always named: a default of the process would have to be agreed on by everything
/// that is linked into it.
pub fn provider() -> Arc<CryptoProvider> {
    static PROVIDER: LazyLock<Arc<CryptoProvider>> = LazyLock::new(|| Arc::new(ring::default_provider()));
    Arc::clone(&PROVIDER)
}

/// [`NAME`] as clients ask for it.
pub fn server_name() -> ServerName<'static> {
    ServerName::try_from(NAME).expect("it is a DNS name")
}

fn authority(now: SystemTime) -> CertificateParams {
    let mut params = valid(CertificateParams::default(), now);
    params.distinguished_name.push(DnType::CommonName, "elasticdl job authority");
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
    params
}

fn leaf(now: SystemTime) -> std::result::Result<CertificateParams, rcgen::Error> {
    let mut params = valid(CertificateParams::new([NAME.to_string()])?, now);
    params.distinguished_name.push(DnType::CommonName, NAME);
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages =
        vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
    params.use_authority_key_identifier_extension = true;
    Ok(params)
}

fn valid(mut params: CertificateParams, now: SystemTime) -> CertificateParams {
    params.distinguished_name = rcgen::DistinguishedName::new();
    params.not_before = (now - DAY).into();
    params.not_after = (now + LIFE).into();
    params
}

type Configs = (Arc<ServerConfig>, Arc<ClientConfig>);

fn configs(ca: &str, cert: &str, key: &str) -> std::result::Result<Configs, String> {
    let wrong = |e: rustls::Error| e.to_string();
    let mut roots = RootCertStore::empty();
    for authority in certificates("the authority", ca)? {
        roots.add(authority).map_err(wrong)?;
    }
    let chain = certificates("the certificate", cert)?;
    let key = PrivateKeyDer::from_pem_slice(key.as_bytes()).map_err(|e| format!("the key: {e}"))?;
    let roots = Arc::new(roots);

    let clients = WebPkiClientVerifier::builder_with_provider(Arc::clone(&roots), provider());
    let clients = clients.build().map_err(|e| e.to_string())?;
    let server = tls13(ServerConfig::builder_with_provider(provider())).with_client_cert_verifier(clients);
    let mut server = server.with_single_cert(chain.clone(), key.clone_key()).map_err(wrong)?;
    // Connections are few and long. Without tickets each of them shows its certificate anew.
    server.send_tls13_tickets = 0;
    let client = tls13(ClientConfig::builder_with_provider(provider())).with_root_certificates(roots);
    let mut client = client.with_client_auth_cert(chain, key).map_err(wrong)?;
    client.resumption = Resumption::disabled();
    Ok((Arc::new(server), Arc::new(client)))
}

fn certificates(what: &str, pem: &str) -> std::result::Result<Vec<CertificateDer<'static>>, String> {
    let all: std::result::Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem.as_bytes()).collect();
    match all {
        Ok(all) if !all.is_empty() => Ok(all),
        Ok(_) => Err(format!("{what}: there is none in the text")),
        Err(e) => Err(format!("{what}: {e}")),
    }
}

fn tls13<S: ConfigSide>(builder: ConfigBuilder<S, rustls::WantsVersions>) -> ConfigBuilder<S, WantsVerifier> {
    builder.with_protocol_versions(&[&TLS13]).expect("the provider has ciphers of TLS 1.3")
}
