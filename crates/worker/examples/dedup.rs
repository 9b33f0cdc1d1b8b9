//! Measures how fast a worker deduplicates the ids of a batch and deals them to partitions. Tells it as one line of JSON.
//!
//! `cargo run --release -p elasticdl-worker --example dedup -- make FILE` writes batches of ids to a file, `measure FILE`
//! reads them, as any peer can: each id is 8 bytes, little-endian.

#[path = "../benches/rates/ids.rs"]
mod ids;

use std::error::Error;
use std::path::Path;

use elasticdl_spec::mix::Rng;
use elasticdl_worker::dedup::{Deduper, Keys};
use ids::{FIELDS, RECORDS};

/// Different batches in a file, so that none is known by heart.
const BATCHES: usize = 8;
/// How often each is deduplicated.
const ROUNDS: usize = 50;
const PARTITIONS: u32 = 8;

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["make", file] => make(file.as_ref()),
        ["measure", file] => measure(file.as_ref()),
        _ => Err("usage: dedup make FILE, or measure FILE".into()),
    }
}

fn make(file: &Path) -> Result<(), Box<dyn Error>> {
    let mut rng = Rng::new(3);
    let batches: Vec<u64> = (0..BATCHES).flat_map(|_| ids::ids(&mut rng)).collect();
    let bytes: Vec<u8> = batches.iter().flat_map(|id| id.to_le_bytes()).collect();
    Ok(std::fs::write(file, bytes)?)
}

fn measure(file: &Path) -> Result<(), Box<dyn Error>> {
    let bytes = std::fs::read(file)?;
    let (words, _) = bytes.as_chunks::<8>();
    let ids: Vec<u64> = words.iter().map(|word| u64::from_le_bytes(*word)).collect();
    let batches: Vec<&[u64]> = ids.chunks_exact(RECORDS * FIELDS).collect();
    let (mut deduper, mut keys) = (Deduper::new(PARTITIONS), Keys::default());
    // The first time working memory grows.
    batches.iter().for_each(|ids| deduper.dedup(ids, &mut keys));
    let start = on_core_seconds()?;
    for _ in 0..ROUNDS {
        batches.iter().for_each(|ids| deduper.dedup(ids, &mut keys));
    }
    let seconds = on_core_seconds()? - start;
    let told = serde_json::json!({
        "ids": keys.index().len(), "unique": keys.unique(), "partitions": PARTITIONS,
        "million_ids_per_second": (ROUNDS * ids.len()) as f64 / seconds / 1e6,
    });
    println!("{told}");
    Ok(())
}

/// Seconds that this thread was on a core: busy neighbours count less.
fn on_core_seconds() -> Result<f64, Box<dyn Error>> {
    // What a thread has run since the last tick is added when it gives up its core.
    std::thread::yield_now();
    let text = std::fs::read_to_string("/proc/thread-self/schedstat")?;
    let nanoseconds: u64 = text.split(' ').next().unwrap_or_default().parse()?;
    Ok(nanoseconds as f64 / 1e9)
}
