//! Deliberate defects: what a migration gets wrong on purpose, to see that it is found.
//!
//! Keeps two promises: a defect counts as found only by the words that say what it is; and a move
//! in which godwit says of itself that the defect has struck counts, whatever was found. Each is
//! made by a fault point that only a build with `test-hooks` has, in real moves of a guest that
//! stamps its memory and its disk. The control is a move with no defect, of which nothing may be
//! found.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use godwit_e2e::{LIMIT, MicroPair, Pair, oldest};
use godwit_stamp::settings::{DiskWork, Mode};
use godwit_testbed::{
    DISK_WORK, DiskImage, Ended, GuestConfig, MicroVm, Movable, QemuBuild, SlowReads, Style,
    TestVm, VmConfig, builds_for, images_for, kvm_builds_for, kvm_for, own_migration,
};
use godwit_units::ByteCount;

/// How long the guest has to find it: the time in which it looks at all of its memory many times.
const LOOKS: Duration = Duration::from_secs(60);
/// What godwit says when a defect has struck, and moves in which it may find nothing to strike: the
/// last round may bring no page that the guest checks.
const STRUCK: &str = "made up: the defect has struck";
const TRIES: u32 = 10;
/// Reads a second of a disk that is slowed down.
const READS: u32 = 150;

/// A defect, and the words by which it is found.
#[derive(Debug)]
pub struct Defect {
    /// Its name on the command line.
    pub name: &'static str,
    /// What is got wrong.
    pub what: &'static str,
    /// The machines it is made with.
    pub bench: Bench,
    /// Options of `godwit migrate`.
    pub migrate: &'static [&'static str],
    /// Options of `godwit receive`.
    pub receive: &'static [&'static str],
    /// How a line of the guest has to begin.
    pub place: &'static str,
    /// What it has to contain: any of these.
    pub guest: &'static [&'static str],
    /// What `godwit migrate --verify` has to say; none: it does not look there.
    pub verify: Option<&'static str>,
    /// What `godwit migrate --audit` has to say: any of these; none: it does not look there.
    pub audit: &'static [&'static str],
}

/// Machines for defects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bench {
    /// Two QEMUs on KVM.
    Memory,
    /// The same with a disk that moves along.
    Disk,
    /// Two microvms whose guest tells which of its pages are free.
    Hints,
    /// Two QEMUs under TCG whose guest reads a slow disk past all caches.
    Direct,
}

const STAYS: Option<&str> = Some("NOT exact");
const MISSED: Option<&str> = Some("NOT an exact copy");

/// Where the guest finds damage: in its memory, on its disk, and in memory into which it read its
/// disk, which gives it right when it is asked again.
const MEMORY: &str = "BUG page=";
const DISK_ITSELF: &str = "BUG disk page=";
const READ_IN: &str = "BUG buffer of disk page=";

/// What the guest says of a page that lacks versions: that it is an older one or, where the guest
/// has written it again before it looked, what these wrote.
const LOST_VERSION: &[&str] = &["found=generation", "found=lost write"];

/// All of them.
pub static DEFECTS: [Defect; 9] = [
    Defect {
        name: "skip",
        what: "one dirty page of the last round is skipped",
        bench: Bench::Memory,
        migrate: &["--fault", "skip-dirty-page"],
        receive: &[],
        place: MEMORY,
        guest: LOST_VERSION,
        verify: MISSED,
        audit: &["reported as written in round"],
    },
    Defect {
        name: "late",
        what: "an old version of a page is delivered behind the newer one",
        bench: Bench::Memory,
        migrate: &[],
        receive: &["--defect", "late-old-page"],
        place: MEMORY,
        guest: LOST_VERSION,
        verify: STAYS,
        audit: &["holds the version of round"],
    },
    Defect {
        name: "swap",
        what: "two pages are placed one for the other",
        bench: Bench::Memory,
        migrate: &["--channels", "1"],
        receive: &["--defect", "swap-pages"],
        place: MEMORY,
        guest: &["found=content of page"],
        verify: STAYS,
        audit: &["holds what was sent for"],
    },
    Defect {
        name: "flip",
        what: "one bit is flipped behind the frame's checksum",
        bench: Bench::Memory,
        migrate: &["--channels", "1"],
        receive: &["--defect", "flip-bit"],
        place: MEMORY,
        guest: &["found=flipped bit"],
        verify: STAYS,
        audit: &["holds bytes that were never sent"],
    },
    Defect {
        name: "forget",
        what: "the last round is forgotten",
        bench: Bench::Memory,
        migrate: &["--fault", "forget-last-round"],
        receive: &[],
        place: MEMORY,
        guest: LOST_VERSION,
        verify: MISSED,
        audit: &["reported as written in round"],
    },
    Defect {
        name: "ahead",
        what: "the guest runs on its device state before its last pages are there",
        bench: Bench::Memory,
        migrate: &[],
        receive: &["--defect", "run-ahead"],
        place: MEMORY,
        guest: LOST_VERSION,
        verify: STAYS,
        audit: &["holds the version of round"],
    },
    Defect {
        name: "hint",
        what: "the hint that a page is free is believed after it was written",
        bench: Bench::Hints,
        migrate: &["--fault", "believe-hints"],
        receive: &[],
        place: MEMORY,
        guest: &["found=all zeroes"],
        verify: MISSED,
        audit: &["left out as free"],
    },
    Defect {
        name: "direct",
        what: "what a device writes directly is missed",
        bench: Bench::Direct,
        migrate: &["--fault", "trust-tracker", "--max-bandwidth", "200MiB/s"],
        receive: &[],
        place: READ_IN,
        guest: &["found=content of page", "found=generation"],
        verify: MISSED,
        audit: &["not reported as written since"],
    },
    Defect {
        name: "extent",
        what: "one extent of a disk is dropped",
        bench: Bench::Disk,
        migrate: &["--disks", "all", "--fault", "drop-extent"],
        receive: &["--disks", "all"],
        place: DISK_ITSELF,
        guest: &["found=generation", "found=all zeroes"],
        verify: None,
        audit: &["and not sent then"],
    },
];

/// The move in which nothing is got wrong.
pub static CONTROL: Defect = Defect {
    name: "none",
    what: "nothing: the control",
    bench: Bench::Memory,
    migrate: &[],
    receive: &[],
    place: "BUG",
    guest: &["BUG"],
    verify: STAYS,
    audit: &["NOT exact"],
};

/// The defect called `name`, of those that any guest's memory can have.
///
/// # Errors
/// What there is, where there is none of this name.
pub fn defect_of_memory(name: &str) -> Result<&'static Defect, String> {
    let of_memory: Vec<_> = DEFECTS.iter().filter(|defect| defect.bench == Bench::Memory).collect();
    let found = of_memory.iter().find(|defect| defect.name == name);
    let names = || of_memory.iter().map(|defect| defect.name).collect::<Vec<_>>().join(", ");
    found.copied().ok_or_else(|| format!("one of: {}", names()))
}

/// Who found a defect in one run.
#[derive(Clone, Debug, Default)]
pub struct Found {
    /// The guest, with the right words; the line.
    pub guest: Option<String>,
    /// `--verify`; its line.
    pub verify: Option<String>,
    /// `--audit`; its line.
    pub audit: Option<String>,
    /// What was said and does not fit.
    pub misfits: Vec<String>,
    /// Moves in which there was nothing to strike.
    pub idle: u32,
}

impl Defect {
    /// Whether godwit says when it has struck. That a page is free is believed for good, of
    /// whichever was written.
    fn tells(&self) -> bool {
        self.name != CONTROL.name && self.bench != Bench::Hints
    }
}

/// Machines at work, between which guests move with and without defects.
#[derive(Debug)]
pub enum Rig {
    /// Two QEMUs.
    Qemu(Box<QemuRig>),
    /// Two microvms.
    Micro(Box<MicroPair>),
}

/// Two QEMUs, and what they stand on.
#[derive(Debug)]
pub struct QemuRig {
    pair: Pair,
    /// The images of the source and the destination.
    disks: Option<(DiskImage, DiskImage)>,
    slow: Option<SlowReads>,
    base: VmConfig,
    _image: Option<DiskImage>,
}

/// 96 MiB that the guest has filled, of which it uses 16 MiB at a time.
const CHURN: &[&str] = &[
    "--memory",
    "128MiB",
    "--mode",
    "churn",
    "--fill",
    "96MiB",
    "--working-set",
    "16MiB",
    "--cpus",
    "2",
    "--balloon",
    "hints",
];

/// A disk so small that the guest writes and reads every page of it each few seconds.
const DISK: ByteCount = ByteCount(1 << 20);

/// Waits until the guest has written nearly all of its disk.
fn await_written(image: &DiskImage) -> anyhow::Result<()> {
    let until = Instant::now() + LIMIT;
    while image.allocated()?.0 < DISK.0 / 16 * 15 {
        ensure!(Instant::now() < until, "the guest does not write its disk");
        std::thread::sleep(Duration::from_millis(50));
    }
    Ok(())
}

fn disk_image() -> anyhow::Result<DiskImage> {
    DiskImage::create("raw", DISK)
}

impl Rig {
    /// Starts the machines of `bench`; `None` where they cannot be had here.
    ///
    /// # Errors
    /// When they do not come up.
    pub fn start(bench: Bench) -> anyhow::Result<Option<Self>> {
        match bench {
            Bench::Hints => {
                if !kvm_for("defects") {
                    return Ok(None);
                }
                Ok(MicroPair::start("defects", CHURN)?.map(|pair| Self::Micro(Box::new(pair))))
            }
            Bench::Memory => {
                let builds = kvm_builds_for("defects");
                let Some(build) = builds.iter().max_by_key(|build| build.version) else {
                    return Ok(None);
                };
                let guest =
                    GuestConfig { fill: ByteCount(32 << 20), ..GuestConfig::small(Mode::Rate) };
                let base = VmConfig::new(build, guest).on_kvm();
                let pair = Pair::start(&base)?;
                Ok(Some(Self::qemu(QemuRig { pair, disks: None, slow: None, base, _image: None })))
            }
            Bench::Disk => {
                let builds = kvm_builds_for("defects");
                let Some(build) = builds.iter().max_by_key(|build| build.version) else {
                    return Ok(None);
                };
                if !images_for("defects") {
                    return Ok(None);
                }
                let guest = GuestConfig {
                    fill: ByteCount(32 << 20),
                    disk: DISK_WORK,
                    ..GuestConfig::small(Mode::Rate)
                };
                let base = VmConfig::new(build, guest).on_kvm();
                let (from, to) = (disk_image()?, disk_image()?);
                let config = |image: &DiskImage| base.clone().with_disk("vda", image);
                let pair = Pair::start_apart(&config(&from), &config(&to))?;
                await_written(&from)?;
                let disks = Some((from, to));
                Ok(Some(Self::qemu(QemuRig { pair, disks, slow: None, base, _image: None })))
            }
            Bench::Direct => {
                let builds = builds_for("defects");
                if builds.is_empty() || !images_for("defects") {
                    return Ok(None);
                }
                // In no file system that is in memory: QEMU reads it past all caches.
                let place = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../target"));
                let image = DiskImage::create_in(place, "raw", ByteCount(32 << 20))?;
                let Some(slow) = SlowReads::for_test("defects", &image.path(), READS) else {
                    return Ok(None);
                };
                let disk = DiskWork {
                    write: 4 << 20,
                    read: 96 << 20,
                    block: ByteCount(256 << 10),
                    span: ByteCount(16 << 20),
                    threads: 8,
                };
                let guest = GuestConfig { disk, ..GuestConfig::small(Mode::Idle) };
                let file = image.path();
                let drive =
                    format!("file={},if=virtio,format=raw,cache=none,aio=threads", file.display());
                let base = VmConfig::new(oldest(&builds)?, guest).with_extra(&["-drive", &drive]);
                let pair = Pair::start(&base)?;
                let (slow, image) = (Some(slow), Some(image));
                Ok(Some(Self::qemu(QemuRig { pair, disks: None, slow, base, _image: image })))
            }
        }
    }

    fn qemu(rig: QemuRig) -> Self {
        Self::Qemu(Box::new(rig))
    }

    /// Makes `defect` in as many moves as it takes to ask everybody who should find it.
    ///
    /// # Errors
    /// When a move does not come to any end that a defect can bring.
    pub fn run(&mut self, defect: &Defect) -> anyhow::Result<Found> {
        let mut found = Found::default();
        if !defect.audit.is_empty() {
            let said = self.struck_move(defect, &["--audit"], &mut found)?;
            let words = |line: &str| defect.audit.iter().any(|words| line.contains(words));
            found.audit = said.filter(|line| keep(line, words(line), &mut found.misfits));
        }
        if let Some(words) = defect.verify {
            let said = self.struck_move(defect, &["--verify"], &mut found)?;
            found.verify = said.filter(|line| keep(line, line.contains(words), &mut found.misfits));
        }
        if found.guest.is_none() {
            self.struck_move(defect, &[], &mut found)?;
        }
        Ok(found)
    }

    /// One move in which the defect has struck; what godwit said, if it found something. What the
    /// guest says goes into `found`.
    fn struck_move(
        &mut self,
        defect: &Defect,
        more: &[&str],
        found: &mut Found,
    ) -> anyhow::Result<Option<String>> {
        for _ in 0..TRIES {
            if let Some(said) = self.one_move(defect, more, found)? {
                return Ok(said);
            }
            found.idle += 1;
        }
        bail!("it found nothing to strike in {TRIES} moves")
    }

    /// One move; `None` where nothing has struck, and nobody says otherwise.
    fn one_move(
        &mut self,
        defect: &Defect,
        more: &[&str],
        found: &mut Found,
    ) -> anyhow::Result<Option<Option<String>>> {
        let options = [defect.migrate, more].concat();
        let (ended, received) = match self {
            Self::Qemu(rig) => rig.migrate(&options, defect.receive)?,
            Self::Micro(pair) => {
                let (mut receive, address) =
                    pair.godwit.receive(&pair.destination, defect.receive)?;
                let migrate = pair.godwit.migrate(&pair.source, &address, &options)?;
                let ended = migrate.wait(LIMIT)?;
                receive.kill();
                (ended, receive.errors())
            }
        };
        let struck =
            !defect.tells() || [&ended.errors, &received].iter().any(|it| it.contains(STRUCK));
        let said = ended.errors.lines().find(|line| line.contains("exact")).map(str::to_owned);
        // Which side runs the guest is not told by how the command ended.
        if self.has_moved()? {
            let wants = |line: &str| {
                let words = defect.guest.iter().any(|words| line.contains(words));
                line.starts_with(defect.place) && words
            };
            let damaged = struck && defect.name != CONTROL.name;
            let bugs = self.bugs(damaged)?;
            let clean = bugs.is_empty();
            for bug in bugs {
                if wants(&bug) {
                    found.guest.get_or_insert(bug);
                } else {
                    found.misfits.push(bug);
                }
            }
            if clean && !damaged {
                self.go_on(true)?;
                if !struck && said.is_none() {
                    return Ok(None);
                }
            } else {
                // What is damaged now must not be found later, and taken for another defect's.
                *self = Self::start(defect.bench)?.context("no machines any more")?;
            }
        } else {
            ensure!(
                ended.last()["outcome"] == "failed",
                "{} {}",
                ended.last(),
                ended.errors.trim()
            );
            ensure!(said.is_some(), "it failed with: {}", ended.errors.trim());
            self.go_on(false)?;
        }
        Ok(Some(said))
    }

    fn has_moved(&mut self) -> anyhow::Result<bool> {
        let until = Instant::now() + LIMIT;
        loop {
            let (here, there) = match self {
                Self::Qemu(rig) => {
                    let there = rig.pair.destination.status().unwrap_or_default();
                    (rig.pair.source.status().unwrap_or_default(), there)
                }
                Self::Micro(pair) => (
                    pair.source.status().unwrap_or_default(),
                    pair.destination.status().unwrap_or_default(),
                ),
            };
            match (here == "running", there == "running") {
                (_, true) => return Ok(true),
                (true, false) => return Ok(false),
                _ if Instant::now() > until => bail!("nobody runs the guest: {here}, {there}"),
                _ => std::thread::sleep(Duration::from_millis(20)),
            }
        }
    }

    /// What the guest at the destination has found, once it has looked at everything; where it is
    /// to find something, that is waited for.
    fn bugs(&self, wanted: bool) -> anyhow::Result<Vec<String>> {
        let vm: &dyn Movable = match self {
            Self::Qemu(rig) => &rig.pair.destination,
            Self::Micro(pair) => &pair.destination,
        };
        let until = Instant::now() + LOOKS;
        let mut seen = 0;
        loop {
            // A guest that is damaged in its own program may never say anything again.
            let beats = vm.wait_for_heartbeats_after(Instant::now(), 5, LOOKS);
            let bugs = vm.bugs();
            let (settled, over) = (bugs.len() == seen, Instant::now() > until);
            if over || (settled && (!bugs.is_empty() || !wanted)) {
                beats.map(drop).or_else(
                    |problem| {
                        if bugs.is_empty() { Err(problem) } else { Ok(()) }
                    },
                )?;
                return Ok(bugs);
            }
            seen = bugs.len();
        }
    }

    /// Gets ready for the next move, of a guest that has `moved` or not.
    fn go_on(&mut self, moved: bool) -> anyhow::Result<()> {
        match self {
            Self::Qemu(rig) => rig.go_on(moved),
            Self::Micro(pair) => {
                let next = MicroVm::start(&pair.godwit, &[CHURN, &["--incoming"]].concat())?;
                let destination = std::mem::replace(&mut pair.destination, next);
                if moved {
                    pair.source = destination;
                }
                Ok(())
            }
        }
    }
}

/// Whether a line fits; one that does not is kept.
fn keep(line: &str, fits: bool, misfits: &mut Vec<String>) -> bool {
    if !fits {
        misfits.push(line.to_owned());
    }
    fits
}

impl QemuRig {
    /// What `migrate` said, and what `receive` complained of.
    fn migrate(&mut self, options: &[&str], receive: &[&str]) -> anyhow::Result<(Ended, String)> {
        let Self { pair, slow, .. } = self;
        if let Some(slow) = slow {
            slow.add(pair.source.pid())?;
        }
        let (mut receive, address) = pair.godwit.receive(&pair.destination, receive)?;
        let migrate = pair.godwit.migrate(&pair.source, &address, options)?;
        let ended = migrate.wait(LIMIT)?;
        if ended.status.success() {
            let received = receive.wait(LIMIT)?;
            return Ok((ended, received.errors));
        }
        // With the guest there it is still at the farewell.
        std::thread::sleep(Duration::from_millis(100));
        receive.kill();
        Ok((ended, receive.errors()))
    }

    fn go_on(&mut self, moved: bool) -> anyhow::Result<()> {
        let next = match &mut self.disks {
            Some((from, to)) => {
                let image = disk_image()?;
                let next = self.base.clone().with_disk("vda", &image);
                if moved {
                    *from = std::mem::replace(to, image);
                } else {
                    *to = image;
                }
                TestVm::destination(&next)?
            }
            None => TestVm::destination(&self.base)?,
        };
        if moved {
            self.pair.move_on(next);
        } else {
            self.pair.destination = next;
        }
        Ok(())
    }
}

/// What came of a move by QEMU itself.
#[derive(Clone, Debug, Default)]
pub struct OwnMove {
    /// Whether the guest found damage behind it, or said nothing any more.
    pub damaged: bool,
    /// What it said.
    pub evidence: Option<String>,
}

/// Moves a Linux that writes as fast as it can, by QEMU's own migration under TCG with the QEMU of
/// `build`, and tells what came of each move; until it is told that this is enough.
///
/// # Errors
/// When QEMU refuses, or a machine does not come up.
pub fn own_moves(
    build: &QemuBuild,
    limit: Duration,
    mut goes_on: impl FnMut(OwnMove) -> anyhow::Result<bool>,
) -> anyhow::Result<()> {
    let config = VmConfig::new(build, GuestConfig::small(Mode::Full));
    let mut source = None;
    loop {
        let mut from = match source.take() {
            Some(source) => source,
            None => {
                let vm = TestVm::source(&config)?;
                vm.wait_ready(LIMIT)?;
                vm
            }
        };
        let mut to = TestVm::destination(&config)?;
        own_migration(&mut from, &mut to, Style::Plain, limit)?;
        let beats = to.wait_for_heartbeats_after(Instant::now(), 20, LOOKS);
        let bugs = to.bugs();
        let damaged = beats.is_err() || !bugs.is_empty();
        let silent = || "the guest says nothing any more".to_owned();
        let evidence = damaged.then(|| bugs.into_iter().next().unwrap_or_else(silent));
        if !goes_on(OwnMove { damaged, evidence })? {
            return Ok(());
        }
        // A guest that is damaged is not moved again.
        source = (!damaged).then_some(to);
    }
}
