//! A link of a given rate: a network namespace at the end of a pair of virtual interfaces, with a
//! token bucket on both.
//!
//! What is started within the namespace shares that link with everything else that is, as the
//! services of another host would. Sockets in the file system are reached from both sides. Keeps
//! one promise: namespace and interfaces go with their owner, or with the next sweep. Needs root.

use std::fs::File;
use std::net::{SocketAddrV4, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow};
use godwit_units::{ByteCount, Rate};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use crate::ip::{remove_namespace, tool};
use crate::leftovers::{Place, unique};
use crate::qemu_build::QemuBuild;
use crate::throughput::throughput;

/// Moves this thread alone into the network `namespace`, until it ends (setns(2)).
///
/// # Errors
/// Without root's rights.
pub fn enter(namespace: &File) -> anyhow::Result<()> {
    move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network))
        .context("cannot enter the namespace")
}

/// Connects to `address`, for as long as `limit`; nothing is waited for longer than that from then
/// on, either. `silent` is said when nobody listens.
pub(crate) fn connect(
    address: SocketAddrV4,
    limit: Duration,
    silent: &'static str,
) -> anyhow::Result<TcpStream> {
    let until = Instant::now() + limit;
    loop {
        match TcpStream::connect_timeout(&address.into(), Duration::from_secs(1)) {
            Ok(connection) => {
                connection.set_nodelay(true)?;
                connection.set_read_timeout(Some(limit))?;
                connection.set_write_timeout(Some(limit))?;
                return Ok(connection);
            }
            Err(_) if Instant::now() < until => std::thread::sleep(Duration::from_millis(20)),
            Err(error) => return Err(error).context(silent),
        }
    }
}

/// Bytes that may pass at once; with a segment of 64 KiB, the largest there is, the rate is kept.
const BURST: u64 = 256 << 10;
/// A packet that would wait longer is dropped.
const LATENCY: &str = "50ms";
const CONNECT_LIMIT: Duration = Duration::from_secs(30);

/// The link and the namespace at its far end.
#[derive(Debug)]
pub struct SlowLink {
    name: String,
    interface: String,
    far: String,
    there: String,
    place: Place,
}

impl SlowLink {
    /// A link that carries `rate` each way.
    ///
    /// # Errors
    /// When the kernel or the tools `ip` and `tc` refuse, for want of privilege for example.
    pub fn create(rate: Rate) -> anyhow::Result<Self> {
        let place = Place::new()?;
        let (name, number) = unique();
        let owner = std::process::id();
        // Names of interfaces have 15 bytes at the most.
        let [interface, far] = ["a", "b"].map(|side| format!("gw{owner:x}{side}{number}"));
        // The range for benchmarks (RFC 2544), four addresses a link.
        let index = (owner * 8 + number) % (1 << 15) * 4;
        let [here, there] = [1, 2].map(|host| {
            format!("198.{}.{}.{}", 18 + (index >> 16), index >> 8 & 255, index % 256 + host)
        });
        tool("ip", &["netns", "add", &name])?;
        let link = Self { name, interface, far, there, place };
        let (name, near, far) = (link.name.as_str(), link.interface.as_str(), link.far.as_str());
        tool("ip", &["link", "add", near, "type", "veth", "peer", "name", far, "netns", name])?;
        tool("ip", &["address", "add", &format!("{here}/30"), "dev", near])?;
        tool("ip", &["-n", name, "address", "add", &format!("{}/30", link.there), "dev", far])?;
        tool("ip", &["link", "set", near, "up"])?;
        tool("ip", &["-n", name, "link", "set", far, "up"])?;
        tool("ip", &["-n", name, "link", "set", "lo", "up"])?;
        let rate = format!("{}bit", (rate.bytes_per_second() * 8.0) as u64);
        let burst = BURST.to_string();
        let bucket = ["root", "tbf", "rate", &rate, "burst", &burst, "latency", LATENCY];
        tool("tc", &[&["qdisc", "add", "dev", near], &bucket[..]].concat())?;
        tool("tc", &[&["-n", name, "qdisc", "add", "dev", far], &bucket[..]].concat())?;
        Ok(link)
    }

    /// Loses every packet from now on, as a cable that was pulled: no connection is told.
    ///
    /// # Errors
    /// When the tool refuses.
    pub fn lose(&self) -> anyhow::Result<()> {
        tool("ip", &["-n", &self.name, "link", "set", &self.far, "down"])
    }

    /// The address at the far end.
    #[must_use]
    pub fn address(&self) -> &str {
        &self.there
    }

    /// What runs `program` at the far end.
    #[must_use]
    pub fn command(&self, program: &Path) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.name]).arg(program);
        command
    }

    /// The same QEMU, at the far end.
    ///
    /// # Errors
    /// When no script can be written.
    pub fn build(&self, build: &QemuBuild) -> anyhow::Result<QemuBuild> {
        build_within(&self.name, &self.place.file("qemu"), build)
    }

    /// What one TCP connection carries to the far end, once it has had `start` to find out how
    /// much that is, in the time `time` after.
    ///
    /// # Errors
    /// When there is no connection, or it breaks.
    pub fn throughput(&self, start: Duration, time: Duration) -> anyhow::Result<Rate> {
        let there = SocketAddrV4::new(self.there.parse()?, 0);
        let namespace = File::open(Path::new("/run/netns").join(&self.name))?;
        let listener = std::thread::scope(|scope| {
            let listening = scope.spawn(|| {
                enter(&namespace)?;
                anyhow::Ok(TcpListener::bind(there)?)
            });
            listening.join().map_err(|_| anyhow!("the thread has panicked"))?
        })?;
        let address = SocketAddrV4::new(*there.ip(), listener.local_addr()?.port());
        let sender = connect(address, CONNECT_LIMIT, "nobody listens")?;
        throughput(&sender, &listener.accept()?.0, start, time)
    }

    /// Bytes that it has carried so far, both ways, headers and all.
    ///
    /// # Errors
    /// When the kernel does not tell.
    pub fn carried(&self) -> anyhow::Result<ByteCount> {
        let count = |name: &str| {
            let path = format!("/sys/class/net/{}/statistics/{name}", self.interface);
            let text =
                std::fs::read_to_string(&path).with_context(|| format!("cannot read {path}"))?;
            text.trim().parse::<u64>().with_context(|| format!("{path} holds no number"))
        };
        Ok(ByteCount(count("tx_bytes")? + count("rx_bytes")?))
    }
}

impl Drop for SlowLink {
    fn drop(&mut self) {
        // At once, also where something still runs in the namespace; its end goes with it.
        let _ = tool("ip", &["link", "delete", &self.interface]);
        remove_namespace(&self.name);
    }
}

/// The same QEMU in the namespace `name`, by way of a script at `script`.
pub(crate) fn build_within(
    name: &str,
    script: &Path,
    build: &QemuBuild,
) -> anyhow::Result<QemuBuild> {
    let program = build.program.display();
    let text = format!("#!/bin/sh\nexec ip netns exec {name} '{program}' \"$@\"\n");
    std::fs::write(script, text).context("cannot write a script")?;
    std::fs::set_permissions(script, std::fs::Permissions::from_mode(0o755))?;
    Ok(QemuBuild { program: script.to_owned(), ..build.clone() })
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::time::{Duration, Instant};

    use super::*;

    #[test]
    fn a_link_carries_what_it_is_told_to_and_goes_away() {
        let link = match SlowLink::create(Rate::from_bytes_per_second(f64::from(8 << 20))) {
            Ok(link) => link,
            Err(why) => {
                crate::skip(
                    "a_link_carries_what_it_is_told_to_and_goes_away",
                    format_args!("{why:#}"),
                );
                return;
            }
        };
        let listener = TcpListener::bind("0.0.0.0:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let (network, host) = link.address().rsplit_once('.').unwrap();
        let near = host.parse::<u8>().unwrap() - 1;
        let script = format!("head -c 8388608 /dev/zero > /dev/tcp/{network}.{near}/{port}");
        let mut sender = link.command(Path::new("bash")).args(["-c", &script]).spawn().unwrap();

        let mut stream = listener.accept().unwrap().0;
        let began = Instant::now();
        let mut bytes = Vec::new();
        stream.read_to_end(&mut bytes).unwrap();
        let took = began.elapsed();
        sender.wait().unwrap();

        assert_eq!(bytes.len(), 8 << 20);
        assert!(took > Duration::from_millis(800), "{took:?}");
        assert!(link.carried().unwrap() > ByteCount(8 << 20));
        let (interface, name) = (link.interface.clone(), link.name.clone());
        drop(link);
        assert!(!Path::new("/sys/class/net").join(interface).exists());
        assert!(!Path::new("/run/netns").join(name).exists());
    }
}
