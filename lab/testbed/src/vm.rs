//! One QEMU with the self-checking guest.
//!
//! Keeps two promises: every wait has a limit, and a QEMU that does not come up is reported with
//! its own words. It has two monitors, one for the test and one for whoever migrates it. Its files
//! and their removal are `leftovers`'s.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow, bail};
use godwit_qemu::monitor::Qmp;
use godwit_stamp::heartbeat::DiskSecond;
use godwit_stamp::settings::ASK;
use godwit_units::ByteCount;
use serde_json::{Value, json};

use crate::booted;
use crate::console::{Beat, Console};
use crate::cpu::CpuTime;
use crate::guest::KERNEL;
use crate::guest_ram::GuestRam;
use crate::kvm;
use crate::leftovers::Place;
use crate::saved::SavedState;
use crate::vm_config::{Accelerator, Backend, VmConfig};

/// QEMU opens its monitors before anything slow; a machine under load takes its time to load the
/// program.
/// MiB for which there is room beside the memory in the slots: there must be some.
const SLOTS: u64 = 1024;
const START_LIMIT: Duration = Duration::from_secs(30);

/// A running QEMU; dropping it ends it and removes its files.
#[derive(Debug)]
pub struct TestVm {
    child: Child,
    qmp: Qmp,
    console: Console,
    vcpus: Vec<i32>,
    config: VmConfig,
    place: Place,
}

impl TestVm {
    /// Starts a machine whose guest boots at once.
    ///
    /// # Errors
    /// When the guest's files are missing or QEMU does not come up.
    pub fn source(config: &VmConfig) -> anyhow::Result<Self> {
        if config.accelerator == Accelerator::Kvm {
            let state = kvm::State::of(
                &config.build,
                &config.guest,
                (config.cpus, config.modules.is_some()),
            )?;
            return Self::from_state(config, state.saved(), || Self::at_gate(config, &state));
        }
        let Some(state) = booted::state_for(config)? else {
            return Self::start(config, &[], &|_| Ok(()));
        };
        let mut vm = Self::from_state(config, &state, || Self::asking(config))?;
        let input = vm.child.stdin.as_mut().context("QEMU has no standard input")?;
        writeln!(input, "{}", config.guest.settings()).context("cannot tell the guest its work")?;
        Ok(vm)
    }

    /// One that starts from `state`, which is that of what `make` makes, if it is not there yet.
    fn from_state(
        config: &VmConfig,
        state: &SavedState<'_>,
        make: impl FnOnce() -> anyhow::Result<Self>,
    ) -> anyhow::Result<Self> {
        if !state.is_kept() {
            let mut vm = make()?;
            state.save(&mut vm.qmp).context("cannot save what guests start from")?;
        }
        let mut vm = Self::destination(config)?;
        let loaded = state.load(&mut vm.qmp);
        loaded.with_context(|| format!("cannot start the guest: {}", vm.errors().trim()))?;
        Ok(vm)
    }

    /// A machine like `config` without what is added, whose vCPUs wait before the program begins.
    fn at_gate(config: &VmConfig, state: &kvm::State<'_>) -> anyhow::Result<Self> {
        let bare = VmConfig {
            accelerator: Accelerator::Firmware,
            cpus: config.cpus,
            modules: config.modules.map(|_| ByteCount::ZERO),
            ..VmConfig::new(&config.build, config.guest)
        };
        let vm = Self::start(&bare, &[], &|ram| state.fill(ram))?;
        state.await_gate(&vm.console)?;
        Ok(vm)
    }

    /// A machine like `config` whose guest has booted and asks for its settings.
    fn asking(config: &VmConfig) -> anyhow::Result<Self> {
        let asking = format!("{KERNEL} {ASK}");
        let vm = Self::start(config, &["-append", &asking], &|_| Ok(()))?;
        booted::await_question(&vm.console)?;
        Ok(vm)
    }

    /// Starts a machine that waits for a guest to arrive.
    ///
    /// # Errors
    /// As [`Self::source`].
    pub fn destination(config: &VmConfig) -> anyhow::Result<Self> {
        Self::start(config, &["-incoming", "defer"], &|_| Ok(()))
    }

    fn start(
        config: &VmConfig,
        role: &[&str],
        fill: &dyn Fn(&Path) -> anyhow::Result<()>,
    ) -> anyhow::Result<Self> {
        let place = Place::with_ram_in(config.ram_in.as_deref())?;
        fill(place.ram())?;
        let errors =
            File::create(place.file("stderr")).context("cannot create a file for QEMU's errors")?;
        let child = Command::new(&config.build.program)
            .args(arguments(config, &place))
            .args(guest_arguments(config, &place)?)
            .args(role)
            .args(&config.extra)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(errors)
            .spawn()
            .with_context(|| format!("cannot start {}", config.build.program.display()))?;
        let mut started = Started { child: Some(child) };
        let (mut qmp, console) = started.talk(&place)?;
        let cpus = qmp.execute("query-cpus-fast", Value::Null)?;
        let thread = |cpu: &Value| cpu["thread-id"].as_i64().and_then(|id| i32::try_from(id).ok());
        let vcpus = cpus.as_array().into_iter().flatten().filter_map(thread).collect();
        let child = started.child.take().context("QEMU was ended")?;
        Ok(Self { child, qmp, console, vcpus, config: config.clone(), place })
    }

    /// What the machine was started with.
    #[must_use]
    pub fn config(&self) -> &VmConfig {
        &self.config
    }

    pub(crate) fn console(&self) -> &Console {
        &self.console
    }

    /// The test's own monitor.
    pub fn qmp(&mut self) -> &mut Qmp {
        &mut self.qmp
    }

    /// The monitor for whoever migrates this machine.
    #[must_use]
    pub fn qmp_socket(&self) -> PathBuf {
        self.place.file("qmp")
    }

    /// The RAM file (there is none with [`Backend::Anonymous`] and [`Backend::Memfd`]).
    #[must_use]
    pub fn ram_file(&self) -> &Path {
        self.place.ram()
    }

    /// Where an observer finds its RAM.
    ///
    /// # Errors
    /// When QEMU does not tell: older ones do not, where no file holds it.
    pub fn ram(&mut self) -> anyhow::Result<GuestRam> {
        if matches!(self.config.backend, Backend::SharedFile | Backend::PrivateFile) {
            return Ok(self.ram_file().into());
        }
        let command = json!({ "command-line": "info ramblock" });
        let listed = self.qmp.execute("human-monitor-command", command)?;
        let listed = listed.as_str().unwrap_or_default();
        let line = listed.lines().map(str::trim).find(|line| line.starts_with("mem "));
        let address = line.and_then(|line| {
            // Name, page size with its unit, offset, used, total, address.
            let digits = line.split_whitespace().nth(6)?.strip_prefix("0x")?;
            u64::from_str_radix(digits, 16).ok()
        });
        let address = address.with_context(|| format!("no address of 'mem' in: {listed}"))?;
        Ok(GuestRam::Process { pid: self.pid(), address, size: self.config.guest.memory.0 })
    }

    /// QEMU's process.
    #[must_use]
    pub fn pid(&self) -> i32 {
        i32::try_from(self.child.id()).unwrap_or(i32::MAX)
    }

    /// The threads that run the virtual processors.
    #[must_use]
    pub fn vcpu_threads(&self) -> &[i32] {
        &self.vcpus
    }

    /// Processor time used so far.
    ///
    /// # Errors
    /// When QEMU has ended.
    pub fn cpu_time(&self) -> anyhow::Result<CpuTime> {
        CpuTime::of(self.pid(), &self.vcpus)
    }

    /// The state QEMU says it is in: `running`, `paused`, `inmigrate`, `postmigrate` and so on.
    ///
    /// # Errors
    /// When QEMU does not answer.
    pub fn status(&mut self) -> anyhow::Result<String> {
        let answer = self.qmp.execute("query-status", Value::Null)?;
        Ok(answer["status"].as_str().unwrap_or_default().to_owned())
    }

    /// Whether the process still runs.
    pub fn is_alive(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }

    /// Waits until the guest has filled its buffer.
    ///
    /// # Errors
    /// When it does not within `limit`, or says that it cannot.
    pub fn wait_ready(&self, limit: Duration) -> anyhow::Result<()> {
        let ready = self.console.wait("sign of being ready", limit, Console::ready);
        ready.and_then(|outcome| outcome.map_err(|text| anyhow!(text)))
    }

    /// The heartbeats that arrived on this side.
    #[must_use]
    pub fn heartbeats(&self) -> Vec<Beat> {
        self.console.beats()
    }

    /// The heartbeats of a guest that moved from here to `destination`.
    #[must_use]
    pub fn heartbeats_across(&self, destination: &Self) -> Vec<Beat> {
        self.console.beats_across(&destination.console)
    }

    /// What the guest told of its disks, a line a second for each of its disk threads, and when
    /// each arrived.
    #[must_use]
    pub fn disk_seconds(&self) -> Vec<(Instant, DiskSecond)> {
        self.console.disk_seconds()
    }

    /// Waits for `count` heartbeats that arrive after `moment`, and returns all that did.
    ///
    /// # Errors
    /// When they do not come within `limit`.
    pub fn wait_for_heartbeats_after(
        &self,
        moment: Instant,
        count: usize,
        limit: Duration,
    ) -> anyhow::Result<Vec<Beat>> {
        self.console.wait(&format!("{count} heartbeats"), limit, |console| {
            let mut beats = console.beats();
            beats.retain(|beat| beat.at > moment);
            (beats.len() >= count).then_some(beats)
        })
    }

    /// Waits for `count` lines to which `wanted` says yes, behind the first `seen` lines of this
    /// side; `what` is for the error.
    ///
    /// # Errors
    /// When they do not come within `limit`.
    pub fn wait_for_lines(
        &self,
        what: &str,
        (seen, count): (usize, usize),
        limit: Duration,
        wanted: impl Fn(&str) -> bool,
    ) -> anyhow::Result<Vec<String>> {
        self.console.wait(what, limit, |console| {
            let mut lines = console.lines();
            lines.drain(..seen.min(lines.len()));
            lines.retain(|line| wanted(line));
            (lines.len() >= count).then_some(lines)
        })
    }

    /// Lines of this side that tell of damaged memory, from the guest or from its kernel.
    #[must_use]
    pub fn bugs(&self) -> Vec<String> {
        self.console.bugs()
    }

    /// All that the guest printed on this side.
    #[must_use]
    pub fn console_lines(&self) -> Vec<String> {
        self.console.lines()
    }

    /// What QEMU itself complained of, but for having more vCPUs than the host has processors.
    #[must_use]
    pub fn errors(&self) -> String {
        let errors = std::fs::read_to_string(self.place.file("stderr")).unwrap_or_default();
        let lines = errors.split_inclusive('\n');
        lines
            .filter(|line| !line.contains("exceeds the recommended cpus supported by KVM"))
            .collect()
    }

    /// Ends QEMU at once, as a crash would.
    pub fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// Asks QEMU to stop the guest.
    ///
    /// # Errors
    /// When QEMU refuses.
    pub fn pause(&mut self) -> anyhow::Result<()> {
        self.qmp.execute("stop", json!({})).map(drop).map_err(Into::into)
    }

    /// Asks QEMU to run the guest on.
    ///
    /// # Errors
    /// When QEMU refuses.
    pub fn resume(&mut self) -> anyhow::Result<()> {
        self.qmp.execute("cont", json!({})).map(drop).map_err(Into::into)
    }
}

impl Drop for TestVm {
    fn drop(&mut self) {
        self.kill();
    }
}

/// A QEMU that is not yet known to work; it is ended unless it does.
struct Started {
    child: Option<Child>,
}

impl Started {
    fn talk(&mut self, place: &Place) -> anyhow::Result<(Qmp, Console)> {
        let child = self.child.as_mut().context("QEMU was ended")?;
        let console = Console::read(child.stdout.take().context("QEMU has no standard output")?);
        let deadline = Instant::now() + START_LIMIT;
        loop {
            match Qmp::connect(&place.file("qmp-test")) {
                Ok(qmp) => return Ok((qmp, console)),
                Err(_) if child.try_wait()?.is_none() && Instant::now() < deadline => {
                    std::thread::sleep(Duration::from_millis(10));
                }
                Err(problem) => {
                    let said = std::fs::read_to_string(place.file("stderr")).unwrap_or_default();
                    bail!("QEMU did not come up: {problem}; it said: {}", said.trim());
                }
            }
        }
    }
}

impl Drop for Started {
    fn drop(&mut self) {
        if let Some(child) = &mut self.child {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// What the machine boots, and what runs it.
fn guest_arguments(config: &VmConfig, place: &Place) -> anyhow::Result<Vec<String>> {
    let accelerator = match config.accelerator {
        Accelerator::Tcg => {
            let mut words = vec!["-accel".to_owned(), "tcg".to_owned()];
            words.extend(config.boot.arguments(&config.guest.command_line())?);
            return Ok(words);
        }
        Accelerator::Kvm => match config.dirty_ring {
            Some(places) => format!("kvm,dirty-ring-size={places}"),
            None => "kvm".to_owned(),
        },
        Accelerator::Firmware => "tcg".to_owned(),
    };
    let firmware = place.file("firmware");
    std::fs::write(&firmware, kvm::FIRMWARE).context("cannot write the firmware")?;
    let firmware = firmware.display().to_string();
    // Not every KVM shows SSE3, and QEMU complains where it is missing.
    let cpu = match config.modules {
        // Beyond a terabyte it takes more than the 40 bits that it has otherwise.
        Some(size) if size > ByteCount::ZERO => "qemu64,pni=off,phys-bits=46",
        _ => "qemu64,pni=off",
    };
    let words = ["-accel", &accelerator, "-cpu", cpu, "-bios", &firmware];
    Ok(words.map(str::to_owned).to_vec())
}

fn arguments(config: &VmConfig, place: &Place) -> Vec<String> {
    let size = config.guest.memory.0;
    let path = place.ram().display();
    let backend = match config.backend {
        Backend::SharedFile => {
            format!("memory-backend-file,id=mem,size={size},share=on,mem-path={path}")
        }
        Backend::PrivateFile => {
            format!("memory-backend-file,id=mem,size={size},share=off,mem-path={path}")
        }
        Backend::Anonymous => format!("memory-backend-ram,id=mem,size={size},reserve=off"),
        Backend::Memfd => format!("memory-backend-memfd,id=mem,size={size},share=on"),
        Backend::HugeMemfd => format!(
            "memory-backend-memfd,id=mem,size={size},share=on,hugetlb=on,hugetlbsize=2M,reserve=off"
        ),
        Backend::GiantMemfd => format!(
            "memory-backend-memfd,id=mem,size={size},share=on,hugetlb=on,hugetlbsize=1G,reserve=off"
        ),
        Backend::Nodes => format!("memory-backend-ram,id=mem,size={},reserve=off", size / 2),
    };
    let half = backend.replace("id=mem,", "id=mem1,");
    let (machine, nodes): (_, &[&str]) = match config.backend {
        Backend::Nodes => {
            ("q35", &["-numa", "node,memdev=mem", "-object", &half, "-numa", "node,memdev=mem1"])
        }
        _ => ("q35,memory-backend=mem", &[]),
    };
    let mib = |bytes: ByteCount| bytes.0 >> 20;
    let memory = match config.modules {
        None => format!("{}M", size >> 20),
        Some(modules) => {
            format!("{}M,slots=2,maxmem={}M", size >> 20, (size >> 20) + mib(modules) + SLOTS)
        }
    };
    let halves = config.modules.map(|size| [size.0 / 2, size.0 - size.0 / 2].map(ByteCount));
    let modules: Vec<String> = halves
        .into_iter()
        .flatten()
        .enumerate()
        .filter(|(_, half)| mib(*half) > 0)
        .flat_map(|(n, half)| {
            let memory = format!("memory-backend-ram,id=more{n},size={}M,reserve=off", mib(half));
            let module = format!("pc-dimm,id=dimm{n},memdev=more{n}");
            ["-object".to_owned(), memory, "-device".to_owned(), module]
        })
        .collect();
    let socket = |name: &str| format!("unix:{},server=on,wait=off", place.file(name).display());
    let words = [
        ["-machine", machine],
        ["-object", &backend],
        ["-m", &memory],
        ["-smp", &config.cpus.to_string()],
        ["-display", "none"],
        ["-vga", "none"],
        ["-serial", "stdio"],
        ["-qmp", &socket("qmp")],
        ["-qmp", &socket("qmp-test")],
        ["-pidfile", &place.pid_file().display().to_string()],
    ];
    let flags = ["-nodefaults", "-no-reboot"];
    let words = words.iter().flatten().chain(nodes).chain(&flags);
    words.map(|&word| word.to_owned()).chain(modules).collect()
}
