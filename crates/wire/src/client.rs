//! The master's client: authentication, a deadline on every call, one connection that mends itself.

use std::time::Duration;

use tonic::service::interceptor::InterceptedService;
use tonic::transport::{Channel, Endpoint};

use crate::auth::{Bearer, Token};
use crate::control::master_client::MasterClient;
use crate::error::{Error, Result};

/// How long a call may take. A beat is held by the master for about a second; all else is quick.
pub const CALL_DEADLINE: Duration = Duration::from_secs(10);

/// A client of the master; cheap to clone.
pub type Client = MasterClient<InterceptedService<Channel, Bearer>>;

/// A client of the master at `address` (host:port). Connects when first used and again when cut off.
pub fn connect(address: &str, token: Token) -> Result<Client> {
    let wrong = |e: tonic::transport::Error| {
        Error::io(format!("using the master address {address}"), std::io::Error::other(e))
    };
    let endpoint = Endpoint::from_shared(format!("http://{address}"))
        .map_err(wrong)?
        .timeout(CALL_DEADLINE)
        .connect_timeout(Duration::from_secs(2))
        .tcp_nodelay(true);
    let client = MasterClient::with_interceptor(endpoint.connect_lazy(), Bearer(token));
    Ok(client.max_decoding_message_size(64 << 20).max_encoding_message_size(64 << 20))
}

/// Turns a call's outcome into ours, naming the call.
pub fn answer<T>(
    call: &'static str,
    outcome: std::result::Result<tonic::Response<T>, tonic::Status>,
) -> Result<T> {
    outcome.map(tonic::Response::into_inner).map_err(|status| Error::Call { call, status: Box::new(status) })
}
