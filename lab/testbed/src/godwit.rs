//! `godwit` as its users run it: two processes that are told by arguments and answer in lines of
//! JSON.
//!
//! Keeps two promises: every wait has a limit, and a process that is dropped is ended. It knows the
//! command line and nothing else of Godwit; what the answers mean is for the callers to say.

use std::ffi::OsStr;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use serde_json::Value;

use crate::console::Console;
use crate::leftovers::Place;
use crate::machine::Movable;
use crate::memory_group::MemoryGroup;
use crate::netns::SlowLink;

const LISTEN_LIMIT: Duration = Duration::from_secs(20);
/// Becomes what stands behind, in the group of which this is the list of processes.
const JOIN: &str = r#"echo $$ > "$0" && exec "$@""#;
/// Becomes what stands behind, where the device before it cannot be opened: not even root may on a
/// mount without devices.
const CLOSE: &str = r#"mount --bind "$0" "$0" && mount -o remount,bind,nodev "$0" && exec "$@""#;

/// The program.
#[derive(Clone, Debug)]
pub struct Godwit {
    program: PathBuf,
    /// What is different about its environment.
    variables: Vec<(String, String)>,
    /// What it may do of what root may: a list as setpriv(1) takes it.
    capabilities: Option<String>,
    /// A device of this host's that it cannot open.
    closed: Option<PathBuf>,
    /// The list of processes of the control group that it is started in.
    group: Option<PathBuf>,
    network: Option<PathBuf>,
}

impl Godwit {
    /// The one that was built with this program: it lies beside it, or a directory above where
    /// tests lie.
    ///
    /// # Errors
    /// When it was not built.
    pub fn built() -> anyhow::Result<Self> {
        crate::children::hear_interrupts();
        let build = "cargo build --bin godwit --features test-hooks";
        Ok(Self::at(built("godwit", build)?))
    }

    /// The one at this place.
    pub(crate) fn at(program: PathBuf) -> Self {
        Self {
            program,
            variables: Vec::new(),
            capabilities: None,
            closed: None,
            group: None,
            network: None,
        }
    }

    /// Another program of the same build, such as `godwit-codecs`, in its place.
    #[must_use]
    pub fn beside(&self, name: &str) -> Self {
        Self { program: self.program.with_file_name(name), ..self.clone() }
    }

    /// The same with no capability but those in `list`, as in `+sys_ptrace,+kill` (setpriv(1)), and
    /// no way to more.
    #[must_use]
    pub fn with_capabilities(mut self, list: &str) -> Self {
        self.capabilities = Some(format!("-all,{list}"));
        self
    }

    /// The same with a variable in its environment, where it is run on this host.
    #[must_use]
    pub fn with_variable(mut self, name: &str, value: &str) -> Self {
        self.variables.push((name.to_owned(), value.to_owned()));
        self
    }

    /// The same where `device` cannot be opened, since its mounts are its own. Needs root.
    #[must_use]
    pub fn without_device(mut self, device: &Path) -> Self {
        self.closed = Some(device.to_owned());
        self
    }

    /// The same in a control group.
    #[must_use]
    pub fn in_group(&self, group: &MemoryGroup) -> Self {
        Self { group: Some(group.dir().join("cgroup.procs")), ..self.clone() }
    }

    /// The same in a network namespace, as on a host whose machines are in its network. Needs root.
    #[must_use]
    pub(crate) fn in_network(&self, namespace: PathBuf) -> Self {
        Self { network: Some(namespace), ..self.clone() }
    }

    fn command(&self) -> Command {
        let mut words: Vec<&OsStr> = Vec::new();
        let network = self.network.as_ref().map(|path| format!("--net={}", path.display()));
        if let Some(network) = &network {
            words.extend(["nsenter", network].map(OsStr::new));
        }
        if let Some(group) = &self.group {
            words.extend(["sh", "-c", JOIN].map(OsStr::new));
            words.push(group.as_os_str());
        }
        if let Some(device) = &self.closed {
            words.extend(["unshare", "--mount", "sh", "-c", CLOSE].map(OsStr::new));
            words.push(device.as_os_str());
        }
        if let Some(list) = &self.capabilities {
            words.extend(["setpriv", "--no-new-privs", "--bounding-set", list].map(OsStr::new));
        }
        words.push(self.program.as_os_str());
        let mut command = Command::new(words[0]);
        command.args(&words[1..]);
        // Records of test VMs are not this user's.
        command.env("XDG_STATE_HOME", std::env::temp_dir().join("godwit-test-state"));
        command.envs(self.variables.iter().map(|(name, value)| (name, value)));
        command
    }

    /// Where the program is.
    #[must_use]
    pub fn program(&self) -> &Path {
        &self.program
    }

    /// Runs it with `arguments` to its end.
    ///
    /// # Errors
    /// When the program does not start.
    pub fn run(&self, arguments: &[&str]) -> anyhow::Result<Output> {
        self.command().args(arguments).output().context("cannot run godwit")
    }

    /// The same for what must succeed.
    ///
    /// # Errors
    /// When it does not: what it complained of.
    pub fn done(&self, arguments: &[&str]) -> anyhow::Result<Output> {
        let output = self.run(arguments)?;
        ensure!(
            output.status.success(),
            "{arguments:?}: {}",
            String::from_utf8_lossy(&output.stderr)
        );
        Ok(output)
    }

    /// Starts `godwit receive` for `vm` and waits until it listens.
    ///
    /// # Errors
    /// When it does not come to that.
    pub fn receive(&self, vm: &dyn Movable, options: &[&str]) -> anyhow::Result<(Running, String)> {
        let command = self.command();
        self.receive_at(command, "127.0.0.1:0", &vm.vm_name(), options)
    }

    /// The same for what is no machine yet, by its name.
    ///
    /// # Errors
    /// As [`Self::receive`].
    pub fn receive_named(&self, vm: &str, options: &[&str]) -> anyhow::Result<(Running, String)> {
        self.receive_at(self.command(), "127.0.0.1:0", vm, options)
    }

    /// The same at an address of the caller's choice.
    ///
    /// # Errors
    /// As [`Self::receive`].
    pub fn receive_named_on(
        &self,
        address: &str,
        vm: &str,
        options: &[&str],
    ) -> anyhow::Result<(Running, String)> {
        self.receive_at(self.command(), address, vm, options)
    }

    /// The same for a QEMU that is started for the guest.
    ///
    /// # Errors
    /// As [`Self::receive`].
    pub fn receive_starting(&self, options: &[&str]) -> anyhow::Result<(Running, String)> {
        self.receive_by(self.command(), "127.0.0.1:0", &["--start"], options)
    }

    /// The same at an address of the caller's choice.
    ///
    /// # Errors
    /// As [`Self::receive`].
    pub fn receive_on(
        &self,
        address: &str,
        vm: &dyn Movable,
        options: &[&str],
    ) -> anyhow::Result<(Running, String)> {
        self.receive_at(self.command(), address, &vm.vm_name(), options)
    }

    /// The same at the far end of `link`.
    ///
    /// # Errors
    /// As [`Self::receive`].
    pub fn receive_over(
        &self,
        link: &SlowLink,
        vm: &dyn Movable,
        options: &[&str],
    ) -> anyhow::Result<(Running, String)> {
        let address = format!("{}:0", link.address());
        self.receive_at(link.command(&self.program), &address, &vm.vm_name(), options)
    }

    fn receive_at(
        &self,
        command: Command,
        address: &str,
        vm: &str,
        options: &[&str],
    ) -> anyhow::Result<(Running, String)> {
        self.receive_by(command, address, &["--vm", vm], options)
    }

    fn receive_by(
        &self,
        command: Command,
        address: &str,
        vm: &[&str],
        options: &[&str],
    ) -> anyhow::Result<(Running, String)> {
        let mut running = self.start(command, "receive", vm, &["--listen", address], options)?;
        let listening = |line: &Value| line["event"] == "listening";
        match running.wait_for("listening", LISTEN_LIMIT, listening) {
            Ok(line) => {
                let address =
                    line["address"].as_str().context("godwit receive names no address")?.to_owned();
                Ok((running, address))
            }
            Err(problem) => {
                running.kill();
                bail!("{problem:#}; godwit receive said: {}", running.errors().trim());
            }
        }
    }

    /// Starts `godwit migrate` of `vm` to the address that `godwit receive` listens at. Unless
    /// `options` say otherwise it does not make lost connections again, so that both sides end at
    /// once where something is broken on purpose.
    ///
    /// # Errors
    /// When the program does not start.
    pub fn migrate(&self, vm: &dyn Movable, to: &str, options: &[&str]) -> anyhow::Result<Running> {
        self.migrate_named(&vm.vm_name(), to, options)
    }

    /// The same for a machine by its name.
    ///
    /// # Errors
    /// When the program does not start.
    pub fn migrate_named(&self, vm: &str, to: &str, options: &[&str]) -> anyhow::Result<Running> {
        self.move_by("migrate", vm, to, options)
    }

    /// Starts `godwit audit`, as [`Self::migrate`] starts `godwit migrate`.
    ///
    /// # Errors
    /// When the program does not start.
    pub fn audit(&self, vm: &dyn Movable, to: &str, options: &[&str]) -> anyhow::Result<Running> {
        self.move_by("audit", &vm.vm_name(), to, options)
    }

    fn move_by(
        &self,
        command: &str,
        vm: &str,
        to: &str,
        options: &[&str],
    ) -> anyhow::Result<Running> {
        let told = options.contains(&"--reconnect");
        let all = [options, if told { &[] } else { &["--reconnect", "0s"] }].concat();
        self.start(self.command(), command, &["--vm", vm], &["--to", to], &all)
    }

    /// Starts `godwit upgrade` of a machine by its name.
    ///
    /// # Errors
    /// When the program does not start.
    pub fn upgrade(&self, vm: &str, options: &[&str]) -> anyhow::Result<Running> {
        self.start(self.command(), "upgrade", &["--vm", vm], &[], options)
    }

    /// Starts `godwit status --watch` of the migration `name`.
    ///
    /// # Errors
    /// When the program does not start.
    pub fn watch(&self, name: &str) -> anyhow::Result<Running> {
        self.start(self.command(), "status", &["--migration", name], &["--watch"], &[])
    }

    /// What ships knows none of the options that make up faults; so does a program that was built
    /// as it ships.
    fn check_hooks(&self, options: &[&str]) -> anyhow::Result<()> {
        let asked = ["--fault", "--slow-channel"].iter().any(|hook| options.contains(hook));
        if asked {
            let output = self.run(&["migrate", "--fault"])?;
            let unknown = String::from_utf8_lossy(&output.stderr).contains("unexpected argument");
            ensure!(
                !unknown,
                "{} was built without what makes up faults: run `cargo build --bin godwit \
                 --features test-hooks`",
                self.program.display()
            );
        }
        Ok(())
    }

    fn start(
        &self,
        mut program: Command,
        command: &str,
        vm: &[&str],
        peer: &[&str],
        options: &[&str],
    ) -> anyhow::Result<Running> {
        self.check_hooks(options)?;
        let place = Place::new()?;
        let errors =
            File::create(place.file("stderr")).context("cannot create a file for errors")?;
        let mut child = program
            .arg(command)
            .args(vm)
            .args(peer)
            .arg("--json")
            .args(options)
            .args(peer.get(1).and_then(|address| open_network(address, options)))
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(errors)
            .spawn()
            .with_context(|| format!("cannot start {}", self.program.display()))?;
        let output = Console::read(child.stdout.take().context("godwit has no standard output")?);
        Ok(Running { child, output, place })
    }
}

/// The program `name` that was built with this one: it lies beside it, or a directory above where
/// tests lie. `build` is what builds it.
pub(crate) fn built(name: &str, build: &str) -> anyhow::Result<PathBuf> {
    let this = std::env::current_exe().context("cannot tell where this program is")?;
    let places = this.ancestors().skip(1).take(2).map(|dir| dir.join(name));
    places.into_iter().find(|path| path.is_file()).with_context(|| {
        format!(
            "there is no {name} beside {}: run `{build}` (with --release for a release)",
            this.display()
        )
    })
}

/// What a `godwit` needs to speak in the clear with an address beyond this host, as that of a link
/// between network namespaces.
fn open_network(address: &str, options: &[&str]) -> Option<&'static str> {
    let local = ["127.", "unix:", "[::1]", "localhost"].iter().any(|it| address.starts_with(it));
    let told = ["--keys", "--insecure"].iter().any(|option| options.contains(option));
    (!local && !told).then_some("--insecure")
}

/// Of the options of a `godwit migrate`, the one that its `godwit receive` needs as well: about
/// disks, or keys that both ends have.
#[must_use]
pub fn shared_by<'a>(options: &'a [&'a str]) -> &'a [&'a str] {
    let shared = |pair: &&[&str]| matches!(pair[0], "--disks" | "--keys");
    options.windows(2).find(shared).unwrap_or_default()
}

/// A `godwit` at work.
#[derive(Debug)]
pub struct Running {
    child: Child,
    output: Console,
    place: Place,
}

/// How a `godwit` ended.
#[derive(Clone, Debug)]
pub struct Ended {
    /// Its exit status.
    pub status: ExitStatus,
    /// The lines of JSON it printed; the last one tells the outcome.
    pub lines: Vec<Value>,
    /// What it complained of.
    pub errors: String,
}

impl Ended {
    /// The last line, null if there was none.
    #[must_use]
    pub fn last(&self) -> &Value {
        self.lines.last().unwrap_or(&Value::Null)
    }
}

impl Running {
    /// Its process.
    #[must_use]
    pub fn pid(&self) -> i32 {
        i32::try_from(self.child.id()).unwrap_or(i32::MAX)
    }

    /// The lines of JSON so far.
    #[must_use]
    pub fn lines(&self) -> Vec<Value> {
        self.output.lines().iter().filter_map(|line| serde_json::from_str(line).ok()).collect()
    }

    /// What it complained of so far.
    #[must_use]
    pub fn errors(&self) -> String {
        std::fs::read_to_string(self.place.file("stderr")).unwrap_or_default()
    }

    /// Waits for a line for which `wanted` answers yes.
    ///
    /// # Errors
    /// When none comes within `limit`.
    pub fn wait_for(
        &self,
        what: &str,
        limit: Duration,
        wanted: impl Fn(&Value) -> bool,
    ) -> anyhow::Result<Value> {
        self.wait_for_behind(0, what, limit, wanted)
    }

    /// The same of what it says from now on. The next line is passed over: it may have been on its
    /// way.
    ///
    /// # Errors
    /// When it ends, or takes longer than `limit`.
    pub fn wait_for_new(
        &self,
        what: &str,
        limit: Duration,
        wanted: impl Fn(&Value) -> bool,
    ) -> anyhow::Result<Value> {
        self.wait_for_behind(self.lines().len() + 1, what, limit, wanted)
    }

    fn wait_for_behind(
        &self,
        lines: usize,
        what: &str,
        limit: Duration,
        wanted: impl Fn(&Value) -> bool,
    ) -> anyhow::Result<Value> {
        self.output.wait(&format!("line '{what}'"), limit, |_| {
            self.lines().into_iter().skip(lines).find(&wanted)
        })
    }

    /// Ends it at once, as a crash would.
    pub fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// Sends it a signal.
    ///
    /// # Errors
    /// When it has ended.
    pub fn signal(&self, signal: rustix::process::Signal) -> anyhow::Result<()> {
        let pid = rustix::process::Pid::from_raw(self.pid()).context("no process")?;
        rustix::process::kill_process(pid, signal).context("cannot send a signal to godwit")
    }

    /// Whether it has closed its output, which it does at its end.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        self.output.is_closed()
    }

    /// Waits until it ends by itself.
    ///
    /// # Errors
    /// When it does not within `limit`; it is ended then.
    pub fn wait(mut self, limit: Duration) -> anyhow::Result<Ended> {
        let deadline = Instant::now() + limit;
        loop {
            if let Some(status) = self.child.try_wait()? {
                // The last line may still be on its way through the pipe.
                self.output.wait_closed(limit)?;
                return Ok(Ended { status, lines: self.lines(), errors: self.errors() });
            }
            if Instant::now() >= deadline {
                bail!("godwit is not done within {limit:?}; it said: {}", self.errors().trim());
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.kill();
    }
}
