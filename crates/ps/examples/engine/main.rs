//! Measures the engine in one process, beside a gather and a hash map, and tells it as one line of JSON.
//!
//! `cargo run --release -p elasticdl-ps --example engine -- memory|large [pairs] [rows]`

mod clock;
mod gather;
mod large;
mod memory;
mod table;

use std::process::ExitCode;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let number = |place: usize, otherwise: usize| {
        arguments.get(place).map_or(Some(otherwise), |text| text.parse().ok())
    };
    let told = match arguments.first().map(String::as_str) {
        Some("memory") => {
            number(1, 9).zip(number(2, memory::ROWS)).map(|(pairs, rows)| memory::run(pairs, rows))
        }
        Some("large") => {
            number(1, 9).zip(number(2, large::ROWS)).map(|(pairs, rows)| large::run(pairs, rows))
        }
        _ => None,
    };
    let Some(told) = told else {
        eprintln!("usage: engine memory|large [pairs] [rows]");
        return ExitCode::FAILURE;
    };
    println!("{told}");
    ExitCode::SUCCESS
}
