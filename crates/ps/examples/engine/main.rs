//! Measures the engine: in one process beside a gather and a hash map, over loopback beside raw TCP and Redis, and on
//! disk beside plain writes. Tells it as one line of JSON.
//!
//! `cargo run --release -p elasticdl-ps --example engine --` followed by
//!
//! - `memory [pairs] [rows]` or `large [pairs] [rows]`
//! - `served [pairs] [dim] [rows] [address of a Redis]`
//! - `checkpoint [pairs] [rows]`, `loaded [rounds] [rows]` or `moving [pairs] [rows] [rounds under load]`

mod checkpoint;
mod clock;
mod gather;
mod large;
mod loaded;
mod memory;
mod moving;
mod raw;
mod redis;
mod served;
mod table;
mod trainers;

use std::error::Error;

const USAGE: &str = "usage: engine memory|large [pairs] [rows], served [pairs] [dim] [rows] [address of a Redis], \
                     checkpoint [pairs] [rows], loaded [rounds] [rows], or moving [pairs] [rows] [rounds under load]";

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let number = |place: usize, otherwise: usize| {
        arguments.get(place).map_or(Ok(otherwise), |text| text.parse::<usize>())
    };
    let times = number(1, 9)?;
    let told = match arguments.first().map(String::as_str) {
        Some("memory") => memory::run(times, number(2, memory::ROWS)?),
        Some("large") => large::run(times, number(2, large::ROWS)?),
        Some("served") => {
            let redis = arguments.get(4).map(String::as_str);
            served::run(times, number(2, 16)?, number(3, served::ROWS)?, redis)?
        }
        Some("checkpoint") => checkpoint::run(times, number(2, memory::ROWS)?)?,
        Some("loaded") => loaded::run(times, number(2, memory::ROWS)?)?,
        Some("moving") => moving::run(times, number(2, memory::ROWS)?, number(3, times)?)?,
        _ => return Err(USAGE.into()),
    };
    println!("{told}");
    Ok(())
}
