//! What the host has left for guests.
//!
//! Memory that the kernel calls available, less what is kept for the host, less what guests were
//! promised that do not use it yet: nobody else keeps that free while they fill it.

use godwit_daemon::messages::Room;
use godwit_memory::in_meminfo;
use godwit_units::ByteCount;

use crate::config::Config;

/// Without another word the host keeps a twentieth, and at least this.
const LEAST_RESERVE: u64 = 1 << 30;

/// What `promised` leaves, of which `arriving` are under way.
pub(crate) fn room(config: &Config, promised: ByteCount, arriving: u32) -> Room {
    let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    let meminfo = read("/proc/meminfo");
    let cpuinfo = read("/proc/cpuinfo");
    let load = read("/proc/loadavg");
    let load = load.split(' ').next().and_then(|text| text.parse().ok()).unwrap_or(0.0);
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    let processors = u32::try_from(processors).unwrap_or(u32::MAX);
    let memory = |name| in_meminfo(&meminfo, name).unwrap_or(0);
    let (memory_bytes, available_bytes) = (memory("MemTotal:"), memory("MemAvailable:"));
    let usual = (memory_bytes / 20).max(LEAST_RESERVE);
    let reserve_bytes = config.reserve.map_or(usual, |reserve| reserve.0);
    Room {
        host: read("/proc/sys/kernel/hostname").trim().to_owned(),
        godwit: env!("CARGO_PKG_VERSION").to_owned(),
        memory_bytes,
        available_bytes,
        reserve_bytes,
        promised_bytes: promised.0,
        room_bytes: available_bytes.saturating_sub(reserve_bytes).saturating_sub(promised.0),
        processor: processor(&cpuinfo).to_owned(),
        processors,
        load,
        cpus: config.cpus.clone(),
        at_once: at_once(config.at_once, load, processors),
        arriving,
        ways: config.ways(),
    }
}

/// The most guests at once of a host that may take in `most`: one, where its processors have more
/// to do than they can.
fn at_once(most: u32, load: f64, processors: u32) -> u32 {
    if load > f64::from(processors) { 1 } else { most }
}

/// Its name in /proc/cpuinfo (proc_cpuinfo(5)).
fn processor(text: &str) -> &str {
    let line = text.lines().find(|line| line.starts_with("model name"));
    line.and_then(|line| line.split_once(':')).map_or("unknown", |(_, name)| name.trim())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_of_the_kernel_are_read_as_they_are() {
        let text = "processor\t: 0\nmodel name\t: AMD EPYC 7763 64-Core Processor\nflags\t: fpu\n";
        assert_eq!(processor(text), "AMD EPYC 7763 64-Core Processor");
        assert_eq!(processor(""), "unknown");
    }

    #[test]
    fn a_host_with_more_to_do_than_it_can_takes_in_one_at_a_time() {
        assert_eq!([at_once(4, 1.9, 2), at_once(4, 2.0, 2), at_once(4, 2.1, 2)], [4, 4, 1]);
    }
}
