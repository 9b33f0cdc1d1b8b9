//! Measures what it costs that worker and server are two processes: the same job with the partitions in the worker's own
//! process, and with a server apart, in turn. Tells it as one line of JSON.
//!
//! `cargo run --release -p elasticdl-worker --example apart -- [pairs] [seconds] [batches]`: how often both are measured,
//! how long each time, and on how many different batches. With `serve large|small` it is the server, until its input ends.

#[path = "../../benches/rates/ids.rs"]
mod ids;
mod job;
mod server;
mod store;
mod training;

use std::error::Error;
use std::sync::Arc;
use std::time::Duration;

use elasticdl_data::Batch;
use elasticdl_worker::stop::Stop;
use serde_json::{Value, json};

use job::{Job, Size};
use server::ServerProcess;
use store::Beside;
use training::Training;

/// The allocator of the binary.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

const USAGE: &str = "usage: apart [pairs] [seconds] [batches], or apart serve large|small";

type Result<T> = std::result::Result<T, Box<dyn Error>>;

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if let ["serve", size] = arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        return server::serve(&Job::new(Size::named(size).ok_or(USAGE)?)?);
    }
    let number = |place: usize, otherwise: u64| {
        arguments.get(place).map_or(Ok(otherwise), |text| text.parse::<u64>().map_err(|_| USAGE))
    };
    let (pairs, seconds, batches) = (number(0, 9)?.max(1), number(1, 5)?, number(2, 64)?.max(1));
    let batches: Arc<[Batch]> = job::batches(batches as usize).into();
    let mut told = json!({ "pairs": pairs, "seconds": seconds, "batches": batches.len() });
    for size in [Size::Large, Size::Small] {
        told[size.name()] = measured(size, pairs, Duration::from_secs(seconds), &batches)?;
    }
    println!("{told}");
    Ok(())
}

/// Both ways in turn, so many times.
fn measured(size: Size, pairs: u64, time: Duration, batches: &Arc<[Batch]>) -> Result<Value> {
    let job = Arc::new(Job::new(size)?);
    let server = ServerProcess::start(size)?;
    let partitions = job.partitions();
    let in_one: training::Stores = Box::new(move |_: &Stop| {
        [0, 1].map(|_| Box::new(Beside(Arc::clone(&partitions))) as Box<dyn elasticdl_worker::store::Store>)
    });
    let mut in_one = Training::new(&job, batches, in_one);
    let mut apart = Training::new(&job, batches, server.stores(&job)?);
    // The first time rows are born and buffers grow.
    in_one.once()?;
    apart.once()?;
    let mut rates = Vec::new();
    for pair in 0..pairs {
        // Who comes second may find the machine otherwise, so they take turns in that as well.
        let (first, second) =
            if pair % 2 == 0 { (&mut in_one, &mut apart) } else { (&mut apart, &mut in_one) };
        let (first, second) = (first.records_per_second(time)?, second.records_per_second(time)?);
        rates.push(if pair % 2 == 0 { (first, second) } else { (second, first) });
    }
    let of = |f: &dyn Fn(&(f64, f64)) -> f64| median(rates.iter().map(f).collect());
    Ok(json!({
        "records_per_second": { "in_one": of(&|r| r.0), "apart": of(&|r| r.1) },
        "apart_of_in_one": of(&|r| r.1 / r.0),
        "rounds": rates,
    }))
}

/// The middle value.
fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    if values.len() % 2 == 1 { values[middle] } else { (values[middle - 1] + values[middle]) / 2.0 }
}
