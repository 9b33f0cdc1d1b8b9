//! The memory that a table says it takes against the memory that the kernel says this process has. One test, in a process
//! of its own, for a process has one memory.

#![allow(clippy::unwrap_used, reason = "a test may fail by panic")]

use elasticdl_ps::{Optimizer, Table};
use elasticdl_spec::mix::mix64;
use elasticdl_spec::shape::RowPart;
use elasticdl_spec::{Evict, Initializer, OptimizerSpec, TableShape, TableSpec};

const MIB: u64 = 1 << 20;
/// For the test itself, and what the kernel counts late.
const SLACK: u64 = MIB / 2;
/// Ids of one push.
const IDS: usize = 4096;

/// Bytes that are resident, and the most since [`begin`].
fn resident() -> (u64, u64) {
    let text = std::fs::read_to_string("/proc/self/status").unwrap();
    let told = |key: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(key)).unwrap();
        line.split_whitespace().next().unwrap().parse::<u64>().unwrap() * 1024
    };
    (told("VmRSS:"), told("VmHWM:"))
}

/// Forgets the most that was resident. `false`: this kernel does not.
fn begin() -> bool {
    std::fs::write("/proc/self/clear_refs", "5").is_ok() && {
        let (now, most) = resident();
        most <= now + SLACK
    }
}

/// A table of rows so wide, trained with adagrad: a row has twice as many floats.
fn table(width: usize, memory_max: Option<u64>) -> (Table, Optimizer) {
    let parts = vec![RowPart { width, init: Initializer::Uniform { bound: 0.5 } }];
    let shape = TableShape { name: "t".into(), parts };
    let adagrad = OptimizerSpec::Adagrad { learning_rate: 0.1, initial_accumulator: 0.1, epsilon: 1e-8 };
    let optimizer = Optimizer::new(adagrad);
    let spec = TableSpec { memory_max, evict: Evict::Use, ..TableSpec::default() };
    (Table::new(shape, 7, &optimizer).with(spec, 1), optimizer)
}

/// Goal: `memory_max` holds for what a process really has, at every moment, and what `bytes` tells is what it has: whole
/// slabs, huge pages and what is held twice while it grows included.
#[test]
fn a_table_has_the_memory_that_it_tells_and_never_more_than_its_bound() {
    if !begin() {
        eprintln!("skipped: this kernel does not forget the most memory that a process had");
        return;
    }
    for (width, memory_max) in [
        (16, Some(24 * MIB)),
        (17, Some(3 * MIB)),
        (17, Some(11 * MIB)),
        (17, Some(48 * MIB)),
        (1, Some(16 * MIB)),
        (700, Some(40 * MIB)),
        (17, None),
    ] {
        let gradients = vec![1.0; IDS * width];
        let mut ids = vec![0; IDS];
        let (before, _) = resident();
        assert!(begin());
        let (mut table, optimizer) = table(width, memory_max);
        let rows = memory_max.unwrap_or(48 * MIB) as usize / (8 * width);
        for from in (0..rows).step_by(IDS) {
            ids.iter_mut().zip(from as u64..).for_each(|(id, n)| *id = mix64(n));
            table.push(&ids, &gradients, &optimizer, 1.0);
            assert!(memory_max.is_none_or(|most| table.bytes() <= most), "{} bytes", table.bytes());
        }
        let ((now, most), told) = (resident(), table.bytes());
        let told_of =
            format!("rows of {width} in {memory_max:?}: {told} bytes told, {now} and {most} after {before}");
        assert!(now - before <= told + SLACK, "{told_of}");
        // Where the kernel has no huge page to give, the last one is told and not all there.
        assert!(told <= now - before + 2 * MIB + SLACK, "{told_of}");
        if let Some(bound) = memory_max {
            assert!(most - before <= bound + SLACK, "{told_of}");
            assert!(table.counts().unwrap().evicted > 0, "{told_of}");
        }
    }
}
