//! Scenarios by name, and scenarios by chance.

use std::time::Duration;

use godwit_policy::{DiskLimit, PostCopy, Settings, ThrottleMode};
use godwit_units::{ByteCount, Rate};

use crate::Rng;
use crate::scenario::{
    Cut, DiskSpec, GuestSpec, Incident, LinkSpec, Moment, Phase, Scenario, Synchronisation,
    Trouble, Vcpus,
};

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

/// What guests waited for a page on average, on loopback (docs/benchmarks.md, "Post-copy beside
/// QEMU's": 232 ms for 1,281 waits).
const FAULT: Duration = Duration::from_micros(180);

/// All names, each with what it shows.
pub const NAMES: [(&str, &str); 12] = [
    ("idle", "8 GiB that nobody writes, 10 Gbit/s"),
    ("busy", "1 GiB, 256 MiB of it written at random 750,000 times a second, 128 MiB/s"),
    ("uniform", "16 GiB, 8 GiB of it written at random 400,000 times a second, 10 Gbit/s"),
    ("hot-cold", "64 GiB, 90 % of writes to 10 % of memory, 10 Gbit/s"),
    ("sequential", "16 GiB, 4 GiB written from front to end at 1.5 GB/s, 10 Gbit/s"),
    ("phases", "16 GiB, quiet for 5 s and busy for 5 s by turns, 10 Gbit/s"),
    ("database", "64 GiB with a 470 GiB disk, 8 KiB random writes, blocks of 64 KiB"),
    ("pause", "256 GiB, 10 GB/s dirtied, 12.5 GB/s, synchronisation of 73 ms at once"),
    ("pause-short", "the same with 12 ms"),
    ("disk-share", "64 GiB with a 640 GiB disk: who gets the link"),
    ("disk-busy", "16 GiB with a 100 GiB disk that is written as fast as it is copied"),
    ("huge", "12 TiB, 10 GB/s dirtied at random over 1 TiB, 100 Gbit/s"),
];

fn bytes(gib: f64) -> ByteCount {
    ByteCount((gib * GIB as f64) as u64)
}

fn rate(bytes: f64) -> Rate {
    Rate::from_bytes_per_second(bytes)
}

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

/// A guest on a link, with all else as usual.
#[must_use]
pub fn plain(title: &str, guest: GuestSpec, bandwidth: Rate) -> Scenario {
    Scenario {
        title: title.to_owned(),
        guest,
        link: LinkSpec {
            bandwidth,
            latency: Duration::from_micros(100),
            loss: 0.0,
            page_bytes: 4100.0,
        },
        disk: None,
        synchronisation: Synchronisation::Pieces(ms(5)),
        vcpus: Vcpus::Measured,
        governor: false,
        handover: ms(10),
        flush: Duration::ZERO,
        hints: Duration::ZERO,
        lead: ms(10),
        settings: Settings::default(),
        post_copy: PostCopy::Never,
        fault: FAULT,
        verify: false,
        verification: Duration::ZERO,
        cut: None,
        incidents: Vec::new(),
        reconnect: Duration::ZERO,
        tick: ms(100),
        longest: Duration::from_secs(100 * 3600),
        seed: 1,
    }
}

/// The scenario of that name.
#[must_use]
pub fn named(name: &str) -> Option<Scenario> {
    let (name, title) = NAMES.iter().find(|(known, _)| *known == name)?;
    let gbit10 = rate(1.25e9);
    let mut scenario = match *name {
        "idle" => plain(title, GuestSpec::idle(bytes(8.0), bytes(2.0)), gbit10),
        "busy" => {
            let guest = GuestSpec::idle(bytes(1.0), ByteCount(628_000_000));
            plain(title, guest.writing(bytes(0.25), 750_000.0), rate(128.0 * MIB as f64))
        }
        "uniform" => {
            let guest = GuestSpec::idle(bytes(16.0), bytes(14.0)).writing(bytes(8.0), 400_000.0);
            plain(title, guest, gbit10)
        }
        "hot-cold" => {
            let guest = GuestSpec::idle(bytes(64.0), bytes(64.0));
            let guest = guest.writing(bytes(6.4), 450_000.0).writing(bytes(57.0), 50_000.0);
            plain(title, guest, gbit10)
        }
        "sequential" => {
            let guest = GuestSpec::idle(bytes(16.0), bytes(12.0)).walking(bytes(4.0), 366_000.0);
            plain(title, guest, gbit10)
        }
        "phases" => {
            let guest = GuestSpec::idle(bytes(16.0), bytes(12.0)).writing(bytes(3.0), 800_000.0);
            let phases = [(5, 0.05), (5, 1.0)];
            let phases =
                phases.map(|(time, factor)| Phase { time: Duration::from_secs(time), factor });
            plain(title, guest.in_phases(phases.to_vec()), gbit10)
        }
        "database" | "disk-share" => {
            let guest = GuestSpec::idle(bytes(64.0), bytes(60.0));
            let guest = guest.writing(bytes(4.0), 120_000.0).writing(bytes(24.0), 40_000.0);
            let mut scenario = plain(title, guest, rate(1.1e9));
            let size = if *name == "disk-share" { bytes(640.0) } else { bytes(470.0) };
            scenario.disk = Some(disk(
                size,
                if *name == "disk-share" { 1e8 } else { 4e8 },
                2e6,
                bytes(40.0),
                64 << 10,
            ));
            scenario
        }
        "pause" | "pause-short" => {
            // Spread so widely that what is dirty is not yet written again.
            let guest =
                GuestSpec::idle(bytes(256.0), bytes(256.0)).writing(bytes(240.0), 10e9 / 4096.0);
            let mut scenario = plain(title, guest, rate(12.5e9));
            let time = if *name == "pause" { 73 } else { 12 };
            scenario.synchronisation = Synchronisation::AtOnce(ms(time));
            scenario.settings.throttle = ThrottleMode::Off;
            scenario.settings.delay_hot_percent = 0;
            scenario
        }
        "disk-busy" => {
            let guest = GuestSpec::idle(bytes(16.0), bytes(12.0)).writing(bytes(1.0), 5_000.0);
            let mut scenario = plain(title, guest, rate(1.25e9));
            scenario.disk = Some(disk(bytes(100.0), 2.5e8, 6e7, bytes(40.0), 64 << 10));
            scenario
        }
        _ => {
            let guest = GuestSpec::idle(bytes(12_288.0), bytes(10_000.0));
            plain(title, guest.writing(bytes(1024.0), 10e9 / 4096.0), rate(12.5e9))
        }
    };
    scenario.title = format!("{name}: {title}");
    Some(scenario)
}

fn disk(
    size: ByteCount,
    speed: f64,
    writes: f64,
    working_set: ByteCount,
    granularity: u64,
) -> DiskSpec {
    DiskSpec {
        size,
        speed: rate(speed),
        writes: rate(writes),
        piece: ByteCount(8192),
        working_set,
        granularity: ByteCount(granularity),
    }
}

/// A migration by chance in which one to three things go wrong, most of them while it lasts.
#[must_use]
pub fn random_trouble(seed: u64) -> Scenario {
    let mut scenario = random(seed);
    let mut rng = Rng::new(seed ^ 0x7472_6f75_626c_6521);
    // The larger, the longer: a hundred segments say as much as a thousand.
    scenario.guest.memory = ByteCount(scenario.guest.memory.0.min(4 << 30));
    scenario.guest.data = ByteCount(scenario.guest.data.0.min(4 << 30));
    scenario.cut = None;
    // Of memory alone: with a disk, the simulation's last round goes on with the pass that it finds
    // and leaves what was written behind it.
    scenario.disk = None;
    scenario.reconnect = [Duration::ZERO, ms(10_000), ms(60_000)][rng.below(3) as usize];
    let (mut at, mut message) = (0.0, 0);
    for _ in 0..=rng.below(3) {
        at += rng.magnitude(0.001, 20.0);
        message += 1 + rng.below(8) as u32;
        let time = Duration::from_secs_f64(rng.magnitude(0.01, 9.0));
        let timed = rng.below(2) == 0;
        let trouble = match rng.below(8) {
            0..3 => Trouble::Cut((rng.below(8) > 0).then_some(time * 4)),
            3 if timed => Trouble::Stall(time),
            3 | 4 => Trouble::SourceKilled,
            5 => Trouble::DestinationKilled,
            6 => Trouble::SourceFails,
            _ => Trouble::DestinationFails,
        };
        let moment =
            if timed { Moment::At(Duration::from_secs_f64(at)) } else { Moment::Message(message) };
        scenario.incidents.push(Incident { moment, trouble });
    }
    scenario
}

/// The same in which the guest leaves before its memory.
#[must_use]
pub fn random_leaving(seed: u64) -> Scenario {
    let mut scenario = random_trouble(seed);
    let mut rng = Rng::new(seed ^ 0x6c65_6176_696e_6721);
    scenario.verify = false;
    scenario.reconnect = scenario.reconnect.max(ms(1_000));
    scenario.post_copy = match rng.below(4) {
        0 => PostCopy::Now,
        1 => PostCopy::OnTimeout,
        _ => PostCopy::After(1 + rng.below(3) as u32),
    };
    // So that it takes a while, and one thing more goes wrong in that.
    scenario.link.bandwidth = rate(rng.magnitude(2e7, 1e9));
    scenario.incidents.truncate(rng.below(3) as usize);
    let trouble = match rng.below(5) {
        0 => Trouble::Cut(Some(Duration::from_secs_f64(rng.magnitude(0.01, 30.0)))),
        1 => Trouble::SourceKilled,
        2 => Trouble::DestinationKilled,
        3 => Trouble::SourceFails,
        _ => Trouble::DestinationFails,
    };
    let before = scenario.incidents.iter().filter_map(|incident| match incident.moment {
        Moment::At(at) => Some(at),
        Moment::Message(_) => None,
    });
    let after = Duration::from_secs_f64(rng.magnitude(0.1, 60.0));
    let moment = Moment::At(before.max().unwrap_or_default() + after);
    scenario.incidents.push(Incident { moment, trouble });
    scenario
}

/// A scenario by chance, small enough to run ten thousand of them.
#[must_use]
pub fn random(seed: u64) -> Scenario {
    let mut rng = Rng::new(seed);
    let memory = rng.magnitude(0.25, 1024.0);
    let data = memory * rng.share();
    let mut guest = GuestSpec::idle(bytes(memory), bytes(data));
    for _ in 0..rng.below(4) {
        let size = bytes(memory * rng.magnitude(0.001, 0.5));
        let writes = rng.magnitude(10.0, 2.5e6);
        guest = if rng.below(4) == 0 {
            guest.walking(size, writes)
        } else {
            guest.writing(size, writes)
        };
    }
    if rng.below(4) == 0 {
        let mut phase = || Phase {
            time: Duration::from_secs_f64(rng.magnitude(0.5, 30.0)),
            factor: 2.0 * rng.share(),
        };
        guest.phases = vec![phase(), phase()];
    }
    let mut scenario =
        plain(&format!("by chance, seed {seed}"), guest, rate(rng.magnitude(5e7, 2.5e10)));
    scenario.seed = seed;
    scenario.tick = ms(500);
    scenario.verify = rng.below(4) == 0;
    scenario.link.latency = Duration::from_secs_f64(rng.magnitude(2e-5, 0.02));
    scenario.link.page_bytes =
        if rng.below(2) == 0 { 4100.0 } else { rng.magnitude(500.0, 4100.0) };
    scenario.link.loss = if rng.below(3) == 0 { 0.5 * rng.share() } else { 0.0 };
    scenario.vcpus =
        [Vcpus::Exact, Vcpus::Measured, Vcpus::Measured, Vcpus::Deaf][rng.below(4) as usize];
    let synchronisation = Duration::from_secs_f64(rng.magnitude(1e-4, 0.1));
    scenario.synchronisation = if rng.below(3) == 0 {
        Synchronisation::AtOnce(synchronisation)
    } else {
        Synchronisation::Pieces(synchronisation)
    };
    if rng.below(6) == 0 {
        let size = bytes(rng.magnitude(1.0, 500.0));
        let speed = rng.magnitude(5e7, 2e9);
        let writes = rng.magnitude(1e5, 2e8);
        let granularity = 4096 << rng.below(9);
        scenario.disk = Some(disk(size, speed, writes, ByteCount(size.0 / 2), granularity));
    }
    settings(&mut scenario.settings, &mut rng);
    if rng.below(3) == 0 {
        let heals = (rng.below(2) == 0).then(|| Duration::from_secs_f64(rng.magnitude(0.1, 100.0)));
        scenario.cut = Some(if rng.below(2) == 0 {
            Cut { at: None, message: Some(rng.below(30) as u32), heals }
        } else {
            Cut {
                at: Some(Duration::from_secs_f64(rng.magnitude(0.01, 100.0))),
                message: None,
                heals,
            }
        });
    }
    match rng.below(8) {
        0..3 => scenario.governor = true,
        3 => scenario.settings.throttle = ThrottleMode::Governor,
        _ => {}
    }
    scenario.hints = Duration::from_secs_f64(rng.magnitude(1e-3, 1.0));
    scenario.flush = Duration::from_secs_f64(rng.magnitude(1e-4, 0.1));
    scenario.verification = Duration::from_secs_f64(rng.magnitude(1e-3, 10.0));
    scenario
}

fn settings(settings: &mut Settings, rng: &mut Rng) {
    settings.throttle = ThrottleMode::ALL[rng.below(5) as usize].0;
    settings.downtime_limit = Duration::from_secs_f64(rng.magnitude(0.01, 3.0));
    settings.max_throttle = 0.5 + 0.01 * rng.below(50) as f64;
    settings.delay_hot_percent = rng.below(91) as u8;
    settings.delay_until_percent = rng.below(101) as u8;
    settings.max_delay = rng.below(60) as u32;
    if rng.below(4) == 0 {
        settings.downtime_ceiling = Some(settings.downtime_limit * 4);
    }
    if rng.below(4) == 0 {
        settings.finish_within = Some(Duration::from_secs_f64(rng.magnitude(1.0, 1000.0)));
    }
    settings.disk_limit = if rng.below(4) == 0 { DiskLimit::Off } else { DiskLimit::Auto };
}
