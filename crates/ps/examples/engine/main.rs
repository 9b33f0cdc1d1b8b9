//! Measures the engine: in one process beside a gather and a hash map, and over loopback. Tells it as one line of JSON.
//!
//! `cargo run --release -p elasticdl-ps --example engine -- memory|large [pairs] [rows]`, or `served [dim] [rows]`

mod clock;
mod gather;
mod large;
mod memory;
mod served;
mod table;

use std::error::Error;

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let number = |place: usize, otherwise: usize| {
        arguments.get(place).map_or(Ok(otherwise), |text| text.parse::<usize>())
    };
    let told = match arguments.first().map(String::as_str) {
        Some("memory") => memory::run(number(1, 9)?, number(2, memory::ROWS)?),
        Some("large") => large::run(number(1, 9)?, number(2, large::ROWS)?),
        Some("served") => served::run(number(1, 16)?, number(2, served::ROWS)?)?,
        _ => return Err("usage: engine memory|large [pairs] [rows], or served [dim] [rows]".into()),
    };
    println!("{told}");
    Ok(())
}
