//! The server as a process of its own: this program once more, found by the address that it prints.

use std::io::{BufRead, BufReader, Read};
use std::net::TcpListener;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;

use elasticdl_ps::server::{Options, Server};
use elasticdl_spec::PartitionId;
use elasticdl_wire::Token;
use elasticdl_worker::ps_client::{self, Directory, Place, Places, PsClient};
use elasticdl_worker::stop::Stop;
use elasticdl_worker::store::Store;

use crate::Result;
use crate::job::{Job, Size};
use crate::training::Stores;

const TOKEN: &str = "apart-0123456789";

/// Serves all partitions, and prints where, until whoever has started this ends.
pub fn serve(job: &Job) -> Result<()> {
    let (listener, token) = (TcpListener::bind("127.0.0.1:0")?, Token::new(TOKEN)?);
    let server = Server::start(listener, token, None, job.partitions(), Options::default())?;
    println!("{}", server.address());
    std::io::stdin().read_to_end(&mut Vec::new())?;
    Ok(())
}

/// A server that runs.
pub struct ServerProcess {
    child: Child,
    address: String,
}

impl ServerProcess {
    pub fn start(size: Size) -> Result<ServerProcess> {
        let mut command = Command::new(std::env::current_exe()?);
        command.args(["serve", size.name()]).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut server = ServerProcess { child: command.spawn()?, address: String::new() };
        let stdout = server.child.stdout.take().ok_or("the server has no output")?;
        BufReader::new(stdout).read_line(&mut server.address)?;
        server.address.truncate(server.address.trim_end().len());
        if server.address.is_empty() {
            return Err("the server has ended before it served".into());
        }
        Ok(server)
    }

    /// What a worker asks it with.
    pub fn stores(&self, job: &Arc<Job>) -> Result<Stores> {
        let (job, token, address) = (Arc::clone(job), Token::new(TOKEN)?, self.address.clone());
        Ok(Box::new(move |stop: &Stop| {
            let partitions = job.spec.servers.partitions;
            let places = Box::new(AllAt(address.clone(), partitions));
            let config = ps_client::Config {
                shape: Arc::clone(&job.shape),
                tables: job.spec.tables.clone(),
                partitions,
                directory: Arc::new(Directory::new(partitions, places)),
                token: token.clone(),
                identity: None,
                worker: 0,
                staged: false,
                stop: stop.clone(),
            };
            [config.clone(), config].map(|config| Box::new(PsClient::new(config)) as Box<dyn Store>)
        }))
    }
}

impl Drop for ServerProcess {
    fn drop(&mut self) {
        // Its input ends, and so does it; where it does not, it is of no use to anybody.
        drop(self.child.stdin.take());
        let _ = self.child.wait();
    }
}

/// All partitions at one place.
struct AllAt(String, u32);

impl Places for AllAt {
    fn places(&self) -> elasticdl_wire::Result<Vec<(PartitionId, Place)>> {
        let place = |p| (PartitionId(p), Place { incarnation: 1, address: self.0.clone() });
        Ok((0..self.1).map(place).collect())
    }
}
