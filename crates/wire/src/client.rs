//! The master's client: authentication, a deadline on every call, one connection that mends itself.

use std::time::Duration;

use tonic::service::interceptor::InterceptedService;
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint};

use crate::auth::{Bearer, Token};
use crate::control::gang_client::GangClient;
use crate::control::master_client::MasterClient;
use crate::error::{Error, Result};
use crate::tls::{self, Identity};

/// How long a call may take. A beat is held by the master for about a second; all else is quick.
pub const CALL_DEADLINE: Duration = Duration::from_secs(10);

/// A client of the master; cheap to clone.
pub type Client = MasterClient<InterceptedService<Channel, Bearer>>;

/// A client of the master of a gang; cheap to clone.
pub type Gang = GangClient<InterceptedService<Channel, Bearer>>;

/// How long a connection may take to be made, and again to shake hands.
const CONNECT_DEADLINE: Duration = Duration::from_secs(2);

/// A client of the master at `address` (host:port); over TLS with an identity. Connects when first used and
/// again when cut off.
pub fn connect(address: &str, token: Token, identity: Option<&Identity>) -> Result<Client> {
    let client = MasterClient::with_interceptor(channel(address, identity)?, Bearer(token));
    Ok(client.max_decoding_message_size(64 << 20).max_encoding_message_size(64 << 20))
}

/// A client of the master at `address` of a job that runs a program of its own; else as [`connect`].
pub fn connect_gang(address: &str, token: Token, identity: Option<&Identity>) -> Result<Gang> {
    Ok(GangClient::with_interceptor(channel(address, identity)?, Bearer(token)))
}

fn channel(address: &str, identity: Option<&Identity>) -> Result<Channel> {
    let wrong = |e: tonic::transport::Error| {
        Error::io(format!("using the master address {address}"), std::io::Error::other(e))
    };
    let scheme = if identity.is_some() { "https" } else { "http" };
    let mut endpoint = Endpoint::from_shared(format!("{scheme}://{address}"))
        .map_err(wrong)?
        .timeout(CALL_DEADLINE)
        .connect_timeout(CONNECT_DEADLINE)
        .tcp_nodelay(true);
    if let Some(identity) = identity {
        let ours = tonic::transport::Identity::from_pem(identity.cert_pem(), identity.key_pem());
        let tls = ClientTlsConfig::new()
            .domain_name(tls::NAME)
            .ca_certificate(Certificate::from_pem(identity.ca_pem()))
            .identity(ours)
            .timeout(CONNECT_DEADLINE);
        endpoint = endpoint.tls_config(tls).map_err(wrong)?;
    }
    Ok(endpoint.connect_lazy())
}

/// Turns a call's outcome into ours, naming the call.
pub fn answer<T>(
    call: &'static str,
    outcome: std::result::Result<tonic::Response<T>, tonic::Status>,
) -> Result<T> {
    outcome.map(tonic::Response::into_inner).map_err(|status| Error::Call { call, status: Box::new(status) })
}
