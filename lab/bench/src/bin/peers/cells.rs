//! The cells of the grid: a guest, a link, and who moves the one over the other.
//!
//! To let the grid grow, add a row to a table here.

use std::time::Duration;

use godwit_bench::fixture::check_room;
use godwit_stamp::settings::Mode;
use godwit_testbed::{
    Accelerator, Backend, Conditions, EmulatedLink, GuestConfig, QemuBuild, VmConfig,
};
use godwit_units::{ByteCount, Rate};

use crate::contestants::Contestant;

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
/// What a move takes beside the guest's memory.
const BESIDE: u64 = 512 * MIB;

/// A guest and its work.
pub(crate) struct Guest {
    pub(crate) name: &'static str,
    accelerator: Accelerator,
    backend: Backend,
    cpus: u32,
    memory: u64,
    fill: u64,
    working_set: u64,
    work: Work,
}

#[derive(Clone, Copy)]
enum Work {
    Idle,
    /// Pages written a second, by all vCPUs together.
    Rate(u64),
    Full,
}

/// On KVM, with anonymous memory.
const KVM: Guest = Guest {
    name: "",
    accelerator: Accelerator::Kvm,
    backend: Backend::Anonymous,
    cpus: 1,
    memory: GIB,
    fill: 512 * MIB,
    working_set: 128 * MIB,
    work: Work::Idle,
};
/// For links that carry little.
const SMALL: Guest = Guest { memory: 256 * MIB, fill: 96 * MIB, working_set: 16 * MIB, ..KVM };

const IDLE_1: Guest = Guest { name: "idle-1", ..KVM };
const IDLE_1_FILE: Guest = Guest { name: "idle-1-file", backend: Backend::SharedFile, ..KVM };
const IDLE_8: Guest = Guest { name: "idle-8", memory: 8 * GIB, fill: 4 * GIB, ..KVM };
const FULL_4: Guest =
    Guest { name: "full-4", memory: 4 * GIB, fill: 3712 * MIB, work: Work::Rate(2000), ..KVM };
const WRITES_2K: Guest = Guest { name: "writes-2k", work: Work::Rate(2000), ..KVM };
const WRITES_20K: Guest =
    Guest { name: "writes-20k", working_set: 256 * MIB, work: Work::Rate(20_000), ..KVM };
const WRITES_20K_4: Guest = Guest { name: "writes-20k-4", cpus: 4, ..WRITES_20K };
const WRITES_200K: Guest =
    Guest { name: "writes-200k", working_set: 256 * MIB, work: Work::Rate(200_000), ..KVM };
const SPEED: Guest = Guest { name: "speed", working_set: 256 * MIB, work: Work::Full, ..KVM };
const SPEED_4: Guest = Guest { name: "speed-4", cpus: 4, ..SPEED };
const SPEED_8: Guest = Guest { name: "speed-8", cpus: 8, ..SPEED };
const LINUX_IDLE: Guest = Guest { name: "linux-idle", accelerator: Accelerator::Tcg, ..KVM };
const SMALL_IDLE: Guest = Guest { name: "small-idle", ..SMALL };
const SMALL_WRITES: Guest = Guest { name: "small-writes", work: Work::Rate(500), ..SMALL };
const SMALL_SPEED: Guest = Guest { name: "small-speed", work: Work::Full, ..SMALL };

/// What lies between the two QEMUs.
pub(crate) struct Link {
    pub(crate) name: &'static str,
    /// In Mbit/s and milliseconds, and the share of packets that is lost; `None`: loopback.
    conditions: Option<(u32, u32, f64)>,
}

const LOOP: Link = Link { name: "loop", conditions: None };
const FAST: Link = Link { name: "10g-1ms", conditions: Some((10_000, 1, 0.0)) };
const NEAR: Link = Link { name: "1g-1ms", conditions: Some((1000, 1, 0.0)) };
const SLOW: Link = Link { name: "100m-20ms", conditions: Some((100, 20, 0.0)) };
const LOSSY: Link = Link { name: "1g-50ms-loss", conditions: Some((1000, 50, 0.001)) };

/// One cell.
pub(crate) struct Cell {
    pub(crate) guest: &'static Guest,
    pub(crate) link: &'static Link,
    pub(crate) contestants: &'static [Contestant],
}

/// Guests that every way moves: it is about time, and processors.
const CALM: &[Contestant] = &[
    Contestant::Godwit,
    Contestant::Plain,
    Contestant::Multifd2,
    Contestant::Multifd4,
    Contestant::MultifdZstd,
];
/// Guests that write: QEMU has more ways for them.
const BUSY: &[Contestant] = &[
    Contestant::Godwit,
    Contestant::Plain,
    Contestant::Multifd4,
    Contestant::MultifdZstd,
    Contestant::Xbzrle,
    Contestant::AutoConverge,
    Contestant::DirtyLimit,
    Contestant::PostCopy,
    Contestant::GodwitPostCopy,
];
/// A connection alone carries little: there are more.
const FAR: &[Contestant] = &[
    Contestant::Godwit,
    Contestant::Plain,
    Contestant::Multifd4,
    Contestant::Multifd8,
    Contestant::MultifdZstd,
    Contestant::Multifd8Zstd,
    Contestant::PostCopy,
    Contestant::GodwitPostCopy,
];

/// The grid.
pub(crate) const CELLS: [Cell; 25] = [
    Cell { guest: &IDLE_1, link: &LOOP, contestants: CALM },
    Cell { guest: &IDLE_1_FILE, link: &LOOP, contestants: CALM },
    Cell { guest: &IDLE_8, link: &LOOP, contestants: CALM },
    Cell { guest: &FULL_4, link: &LOOP, contestants: CALM },
    Cell { guest: &LINUX_IDLE, link: &LOOP, contestants: CALM },
    Cell { guest: &WRITES_2K, link: &LOOP, contestants: CALM },
    Cell { guest: &WRITES_20K, link: &LOOP, contestants: BUSY },
    Cell { guest: &WRITES_20K_4, link: &LOOP, contestants: BUSY },
    Cell { guest: &WRITES_200K, link: &LOOP, contestants: BUSY },
    Cell { guest: &SPEED, link: &LOOP, contestants: BUSY },
    Cell { guest: &SPEED_4, link: &LOOP, contestants: BUSY },
    Cell { guest: &SPEED_8, link: &LOOP, contestants: BUSY },
    Cell { guest: &IDLE_1, link: &FAST, contestants: CALM },
    Cell { guest: &WRITES_20K, link: &FAST, contestants: BUSY },
    Cell { guest: &IDLE_1, link: &NEAR, contestants: CALM },
    Cell { guest: &FULL_4, link: &NEAR, contestants: CALM },
    Cell { guest: &WRITES_20K, link: &NEAR, contestants: BUSY },
    Cell { guest: &WRITES_200K, link: &NEAR, contestants: BUSY },
    Cell { guest: &SPEED, link: &NEAR, contestants: BUSY },
    Cell { guest: &SPEED_4, link: &NEAR, contestants: BUSY },
    Cell { guest: &SMALL_IDLE, link: &SLOW, contestants: CALM },
    Cell { guest: &SMALL_WRITES, link: &SLOW, contestants: BUSY },
    Cell { guest: &SMALL_SPEED, link: &SLOW, contestants: BUSY },
    Cell { guest: &SMALL_IDLE, link: &LOSSY, contestants: FAR },
    Cell { guest: &SMALL_WRITES, link: &LOSSY, contestants: FAR },
];

impl Guest {
    /// A machine with it.
    fn config(&self, build: &QemuBuild) -> VmConfig {
        let (mode, rate) = match self.work {
            Work::Idle => (Mode::Idle, 0),
            Work::Rate(rate) => (Mode::Rate, rate),
            Work::Full => (Mode::Full, 0),
        };
        let guest = GuestConfig {
            memory: ByteCount(self.memory),
            mode,
            rate,
            working_set: ByteCount(self.working_set),
            fill: ByteCount(self.fill),
            ..GuestConfig::standard()
        };
        let config = VmConfig::new(build, guest).with_backend(self.backend);
        VmConfig { accelerator: self.accelerator, cpus: self.cpus, ..config }
    }

    /// Whether it writes as fast as it can.
    pub(crate) fn is_at_full_speed(&self) -> bool {
        matches!(self.work, Work::Full)
    }

    /// In words.
    pub(crate) fn what(&self) -> String {
        let under = match self.accelerator {
            Accelerator::Kvm => "KVM",
            _ => "Linux under TCG",
        };
        let cpus = match self.cpus {
            1 => String::new(),
            cpus => format!(", {cpus} vCPUs"),
        };
        let file =
            if self.backend == Backend::SharedFile { ", memory in a shared file" } else { "" };
        let [memory, fill, written] = [self.memory, self.fill, self.working_set].map(ByteCount);
        let work = match self.work {
            Work::Idle => "idle".to_owned(),
            Work::Rate(rate) => format!("{rate} pages/s over {written}"),
            Work::Full => format!("full speed over {written}"),
        };
        format!("{under}{cpus}, {memory}, {fill} filled, {work}{file}")
    }
}

impl Link {
    fn conditions(&self) -> Option<Conditions> {
        let (mbit, millis, loss) = self.conditions?;
        let rate = Rate::from_bytes_per_second(f64::from(mbit) * 1e6 / 8.0);
        let conditions = Conditions::new(rate, Duration::from_millis(u64::from(millis)));
        Some(conditions.with_loss(loss))
    }

    /// Whether it carries less than the machines could send.
    pub(crate) fn is_slow(&self) -> bool {
        self.conditions.is_some()
    }

    /// Makes it.
    pub(crate) fn create(&self) -> anyhow::Result<EmulatedLink> {
        match self.conditions() {
            Some(conditions) => EmulatedLink::create(&conditions),
            None => EmulatedLink::loopback(),
        }
    }

    /// In words.
    pub(crate) fn what(&self) -> String {
        let Some((mbit, millis, loss)) = self.conditions else { return "loopback".to_owned() };
        let rate = Rate::from_bytes_per_second(f64::from(mbit) * 1e6 / 8.0).in_bits();
        let lost = if loss > 0.0 { format!(", {} % lost", loss * 100.0) } else { String::new() };
        format!("{rate}, round trip {millis}ms{lost}")
    }
}

impl Cell {
    /// What it is called.
    pub(crate) fn name(&self) -> String {
        format!("{}/{}", self.guest.name, self.link.name)
    }

    /// Whether `word` names it: the cell, its guest, or its link.
    pub(crate) fn is_called(&self, word: &str) -> bool {
        word == self.name() || word == self.guest.name || word == self.link.name
    }

    /// The machines at both ends.
    pub(crate) fn machines(
        &self,
        build: &QemuBuild,
        link: &EmulatedLink,
        who: Contestant,
    ) -> anyhow::Result<[VmConfig; 2]> {
        let machine = |build: QemuBuild| {
            let config = self.guest.config(&build);
            who.ring().map_or(config.clone(), |places| config.with_dirty_ring(places))
        };
        Ok([machine(link.near().build(build)?), machine(link.far().build(build)?)])
    }

    /// How long a move may take: half a minute, and six times what the link needs for the guest's
    /// memory.
    pub(crate) fn deadline(&self) -> Duration {
        let least = match self.conditions().and_then(|it| it.rate) {
            Some(rate) => rate.time_for(ByteCount(self.guest.fill)).unwrap_or_default(),
            None => Duration::ZERO,
        };
        // What is lost makes a connection carry a fraction of what the link does.
        let lossy = self.conditions().is_some_and(|it| it.loss > 0.0);
        Duration::from_secs(if lossy { 120 } else { 30 }) + 6 * least
    }

    fn conditions(&self) -> Option<Conditions> {
        self.link.conditions()
    }

    /// At the destination godwit asks for room for all memory, whatever is filled of it.
    pub(crate) fn check_room(&self) -> anyhow::Result<()> {
        check_room(self.guest.fill + self.guest.memory, BESIDE, "cells with --only")
    }

    /// Whether it needs KVM.
    pub(crate) fn needs_kvm(&self) -> bool {
        self.guest.accelerator == Accelerator::Kvm
    }
}

/// Every word that names cells.
pub(crate) fn words() -> Vec<String> {
    let mut words: Vec<String> = CELLS.iter().map(Cell::name).collect();
    for cell in &CELLS {
        for word in [cell.guest.name, cell.link.name] {
            if !words.iter().any(|known| known == word) {
                words.push(word.to_owned());
            }
        }
    }
    words
}
