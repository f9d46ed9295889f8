//! A link as it is found between data centres: two network namespaces, and a program between them
//! that carries packets slowly, late, unevenly, or not at all. It is made of TUN devices, as not
//! every kernel has netem.
//!
//! What is started within one of the namespaces reaches the other over the link, and nothing else.
//! Sockets in the file system are reached from everywhere. TCP's congestion control is CUBIC, as in
//! kernels that were not told otherwise, where the host allows that
//! (net.ipv4.tcp_allowed_congestion_control), else the host's own. Keeps one promise: program,
//! devices and namespaces go with their owner, or with the next sweep. Needs root.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::net::{Ipv4Addr, SocketAddrV4, TcpListener};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, anyhow, ensure};
use godwit_units::{ByteCount, Rate};

use crate::conditions::Conditions;
use crate::cpu::CpuTime;
use crate::godwit::built;
use crate::ip::{remove_namespace, tool};
use crate::leftovers::{Place, unique};
use crate::netns::{build_within, connect, enter};
use crate::pings::Pings;
use crate::qemu_build::QemuBuild;
use crate::throughput::throughput;

const PROGRAM: &str = "link-emulator";
/// The range for benchmarks (RFC 2544). The namespaces have no way out, so each may have the same.
const ADDRESSES: [Ipv4Addr; 2] = [Ipv4Addr::new(198, 18, 0, 1), Ipv4Addr::new(198, 18, 0, 2)];
const CONGESTION_CONTROL: &str = "/proc/sys/net/ipv4/tcp_congestion_control";
const CONNECT_LIMIT: Duration = Duration::from_secs(30);

/// One end of a link: a network namespace, and its address.
#[derive(Debug)]
pub struct LinkEnd {
    name: String,
    address: Ipv4Addr,
    place: Place,
}

impl LinkEnd {
    fn create(address: Ipv4Addr) -> anyhow::Result<Self> {
        let place = Place::new()?;
        let (name, _) = unique();
        tool("ip", &["netns", "add", &name])?;
        let end = Self { name, address, place };
        tool("ip", &["-n", &end.name, "link", "set", "lo", "up"])?;
        end.within(|| {
            // A namespace may choose among those only that are for everybody.
            let _ = std::fs::write(CONGESTION_CONTROL, "cubic");
            Ok(())
        })?;
        Ok(end)
    }

    /// The address here.
    #[must_use]
    pub fn address(&self) -> Ipv4Addr {
        self.address
    }

    /// TCP's congestion control here.
    ///
    /// # Errors
    /// When the kernel does not tell.
    pub fn congestion_control(&self) -> anyhow::Result<String> {
        let text = self.within(|| Ok(std::fs::read_to_string(CONGESTION_CONTROL)?));
        Ok(text.context(CONGESTION_CONTROL)?.trim().to_owned())
    }

    /// The file of the namespace.
    #[must_use]
    pub fn namespace(&self) -> PathBuf {
        PathBuf::from("/run/netns").join(&self.name)
    }

    /// The same QEMU, here.
    ///
    /// # Errors
    /// When no script can be written.
    pub fn build(&self, build: &QemuBuild) -> anyhow::Result<QemuBuild> {
        build_within(&self.name, &self.place.file("qemu"), build)
    }

    /// What `work` does in this namespace, by a thread of its own; a program that it starts stays
    /// here.
    ///
    /// # Errors
    /// Its own, and when the namespace cannot be entered.
    pub fn within<T: Send>(
        &self,
        work: impl FnOnce() -> anyhow::Result<T> + Send,
    ) -> anyhow::Result<T> {
        let namespace = File::open(self.namespace()).context("the namespace is gone")?;
        std::thread::scope(|scope| {
            let work = scope.spawn(|| {
                enter(&namespace)?;
                work()
            });
            work.join().map_err(|_| anyhow!("the thread has panicked"))?
        })
    }
}

impl Drop for LinkEnd {
    fn drop(&mut self) {
        remove_namespace(&self.name);
    }
}

/// The link.
#[derive(Debug)]
pub struct EmulatedLink {
    near: LinkEnd,
    /// `None`: the same as the near one.
    far: Option<LinkEnd>,
    emulator: Option<Child>,
}

impl EmulatedLink {
    /// What the link is called in either namespace.
    pub const DEVICE: &'static str = "far0";

    /// A link between two namespaces under these conditions.
    ///
    /// # Errors
    /// When the kernel or the tool `ip` refuse, for want of privilege for example, or the emulator
    /// was not built.
    pub fn create(conditions: &Conditions) -> anyhow::Result<Self> {
        let program = built(PROGRAM, "cargo build --package godwit-testbed --bins")?;
        let [near, far] = ADDRESSES.map(LinkEnd::create);
        let (near, far) = (near?, far?);
        let mut child = Command::new(&program)
            .args([near.namespace(), far.namespace()])
            .args(conditions.to_string().split(' '))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .with_context(|| format!("cannot start {}", program.display()))?;
        let output = child.stdout.take();
        let link = Self { near, far: Some(far), emulator: Some(child) };
        let mut said = String::new();
        // It says something or ends.
        BufReader::new(output.context("no output")?).read_line(&mut said)?;
        ensure!(said.trim() == "ready", "{PROGRAM} has ended");
        for end in [link.near(), link.far()] {
            let device = ["-n", &end.name];
            let address = format!("{}/30", end.address);
            tool(
                "ip",
                &[&device[..], &["address", "add", &address, "dev", Self::DEVICE]].concat(),
            )?;
            tool("ip", &[&device[..], &["link", "set", "dev", Self::DEVICE, "up"]].concat())?;
        }
        Ok(link)
    }

    /// One namespace with nothing but its loopback, whose ends are the same: what runs there
    /// shares a host with nobody.
    ///
    /// # Errors
    /// As [`Self::create`].
    pub fn loopback() -> anyhow::Result<Self> {
        Ok(Self { near: LinkEnd::create(Ipv4Addr::LOCALHOST)?, far: None, emulator: None })
    }

    /// The end that things leave from.
    #[must_use]
    pub fn near(&self) -> &LinkEnd {
        &self.near
    }

    /// The end that they go to.
    #[must_use]
    pub fn far(&self) -> &LinkEnd {
        self.far.as_ref().unwrap_or(&self.near)
    }

    /// Bytes that it has carried so far, both ways, with their headers.
    ///
    /// # Errors
    /// When the kernel does not tell.
    pub fn carried(&self) -> anyhow::Result<ByteCount> {
        let table =
            self.near.within(|| Ok(std::fs::read_to_string("/proc/thread-self/net/dev")?))?;
        let device = if self.far.is_some() { Self::DEVICE } else { "lo" };
        let [received, sent] = counts(&table, device)
            .with_context(|| format!("the kernel tells nothing of the device '{device}'"))?;
        // What is sent over loopback is received there, too.
        Ok(ByteCount(if self.far.is_some() { received + sent } else { sent }))
    }

    /// Processor time of the emulator, if there is one.
    ///
    /// # Errors
    /// When it has ended.
    pub fn cpu_time(&self) -> anyhow::Result<Duration> {
        let Some(emulator) = &self.emulator else { return Ok(Duration::ZERO) };
        let time = CpuTime::of(i32::try_from(emulator.id())?, &[])?;
        Ok(time.others)
    }

    /// Starts to ping the far end from the near one, every 5 ms.
    ///
    /// # Errors
    /// When there is no socket to be had.
    pub fn ping(&self) -> anyhow::Result<Pings> {
        Pings::start(&self.near.namespace(), self.far().address)
    }

    /// What one TCP connection carries to the far end, once it has had `start` to find out how
    /// much that is, in the time `time` after.
    ///
    /// # Errors
    /// When there is no connection, or it breaks.
    pub fn throughput(&self, start: Duration, time: Duration) -> anyhow::Result<Rate> {
        let far = self.far();
        let listener = far.within(|| Ok(TcpListener::bind(SocketAddrV4::new(far.address, 0))?))?;
        let port = listener.local_addr()?.port();
        let sender = self.near.within(|| {
            connect(SocketAddrV4::new(far.address, port), CONNECT_LIMIT, "nobody listens")
        })?;
        throughput(&sender, &listener.accept()?.0, start, time)
    }
}

/// What `device` has received and sent, by a table like /proc/net/dev (proc(5)).
fn counts(table: &str, device: &str) -> Option<[u64; 2]> {
    let of = |line: &str| Some(line.trim().strip_prefix(device)?.strip_prefix(':')?.to_owned());
    let numbers = table.lines().find_map(of)?;
    let numbers: Vec<u64> = numbers.split_whitespace().filter_map(|it| it.parse().ok()).collect();
    Some([*numbers.first()?, *numbers.get(8)?])
}

impl Drop for EmulatedLink {
    fn drop(&mut self) {
        if let Some(emulator) = &mut self.emulator {
            let _ = emulator.kill();
            let _ = emulator.wait();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_of_a_device_are_read_from_the_kernels_table() {
        let table = "Inter-|   Receive\n face |bytes    packets\n\
                     \x20   lo:  250 1 0 0 0 0 0 0 251 1 0 0 0 0 0 0\n\
                     \x20 far0: 7 1 0 0 0 0 0 0 9 1 0 0 0 0 0 0\n";
        assert_eq!(counts(table, "far0"), Some([7, 9]));
        assert_eq!(counts(table, "lo"), Some([250, 251]));
        assert_eq!(counts(table, "far"), None);
    }
}
