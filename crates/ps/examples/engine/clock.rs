//! Time on a core, and the memory of this process.

/// Million items a second of this thread's time on a core, so that busy neighbours count less.
pub fn rate(count: usize, work: impl FnOnce()) -> f64 {
    let start = on_core_seconds();
    work();
    count as f64 / (on_core_seconds() - start) / 1e6
}

/// The same rate of work that was done just before: caches hold what they can of its memory, and not what others used.
pub fn steady_rate(count: usize, mut work: impl FnMut()) -> f64 {
    work();
    rate(count, work)
}

fn on_core_seconds() -> f64 {
    // What a thread has run since the last tick is added when it gives up its core.
    std::thread::yield_now();
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    let nanoseconds = text.split(' ').next().and_then(|n| n.parse::<u64>().ok());
    nanoseconds.expect("the kernel tells how long a thread was on a core") as f64 / 1e9
}

/// The most memory that this process ever had resident, in bytes.
pub fn peak_bytes() -> u64 {
    memory("VmHWM:")
}

/// The memory that it has resident now.
pub fn resident_bytes() -> u64 {
    memory("VmRSS:")
}

fn memory(key: &str) -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix(key));
    let kilobytes = line.and_then(|rest| rest.split_whitespace().next()?.parse::<u64>().ok());
    kilobytes.expect("the kernel tells how much memory a process has") * 1024
}

/// Processor time of this process, in steps of 10 ms; 0 where it cannot be told.
pub fn processor_seconds() -> f64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let ticks = stat.rsplit(") ").next().into_iter().flat_map(|rest| rest.split(' ').skip(11).take(2));
    ticks.filter_map(|ticks| ticks.parse::<f64>().ok()).sum::<f64>() / 100.0
}
