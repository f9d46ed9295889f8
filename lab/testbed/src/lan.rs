//! A network of virtual machines: a switch, a port for each machine, and a client that pings.
//!
//! The switch is a bridge in a network namespace of its own, the ports are tap devices, and the
//! client sits at the bridge's own address: like any switch, the bridge sends a frame to the port
//! at which it last heard its destination. Keeps one promise: namespace, bridge and ports go with
//! their owner, or with the next sweep. Needs root.

use std::net::Ipv4Addr;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};

use godwit_stamp::settings::CardAddress;

use crate::godwit::Godwit;
use crate::ip::{remove_namespace, tool};
use crate::leftovers::{Place, unique};
use crate::net_back_end::NetBackEnd;
use crate::netns::build_within;
use crate::pings::Pings;
use crate::qemu_build::QemuBuild;
use crate::redis::RedisClient;
use crate::talk::Talk;
use crate::vm_config::{Accelerator, VmConfig};

/// The range for benchmarks (RFC 2544). The namespace has no way out, so each may have the same.
const GUEST: CardAddress = CardAddress { host: Ipv4Addr::new(198, 18, 0, 2), prefix: 24 };
const CLIENT: &str = "198.18.0.1/24";
/// The guest's card has the same address at each port.
const MAC: &str = "52:54:00:12:34:56";

/// The network.
#[derive(Debug)]
pub struct Lan {
    name: String,
    ports: AtomicU32,
    place: Place,
}

impl Lan {
    /// A network without machines.
    ///
    /// # Errors
    /// When the kernel or the tool `ip` refuse, for want of privilege for example.
    pub fn create() -> anyhow::Result<Self> {
        let place = Place::new()?;
        let (name, _) = unique();
        tool("ip", &["netns", "add", &name])?;
        let lan = Self { name, ports: AtomicU32::new(0), place };
        lan.ip(&["link", "set", "lo", "up"])?;
        // Without a delay a port forwards from the start, as those of a hypervisor do.
        lan.ip(&[
            "link",
            "add",
            "switch",
            "type",
            "bridge",
            "stp_state",
            "0",
            "forward_delay",
            "0",
        ])?;
        lan.ip(&["address", "add", CLIENT, "dev", "switch"])?;
        lan.ip(&["link", "set", "switch", "up"])?;
        Ok(lan)
    }

    /// The same machine with a virtio card at a port of its own; the guest gives it the address
    /// that is pinged. One on KVM answers pings and echoes, and nothing else.
    ///
    /// # Errors
    /// When there is no port to be had.
    pub fn attach(&self, config: &VmConfig) -> anyhow::Result<VmConfig> {
        let port = self.add_port()?;
        let mut config = config.clone();
        config.build = self.build(&config.build, &port)?;
        let back_end = format!("tap,id=net,ifname={port},script=no,downscript=no");
        Ok(with_card(config.with_extra(&["-netdev", &back_end])))
    }

    /// The same with the card in a process of its own, which is to outlive the machine. Its RAM
    /// must be shared.
    ///
    /// # Errors
    /// When there is no port to be had, or the process does not start.
    pub fn attach_beside(&self, config: &VmConfig) -> anyhow::Result<(VmConfig, NetBackEnd)> {
        let back_end = NetBackEnd::start(&self.namespace(), &self.add_port()?)?;
        let mut config = config.clone();
        config.extra.extend(back_end.arguments());
        let mut config = with_card(config);
        // Such a card with MSI-X crashes QEMU 7.2 where KVM has nothing to do with it: it looks
        // for an irqfd (virtio_pci_vector_unmask in hw/virtio/virtio-pci.c).
        if let (true, Some(card)) = (config.build.version.0 < 10, config.extra.last_mut()) {
            card.push_str(",vectors=0");
        }
        Ok((config, back_end))
    }

    fn add_port(&self) -> anyhow::Result<String> {
        let port = format!("port{}", self.ports.fetch_add(1, Ordering::Relaxed));
        self.ip(&["tuntap", "add", &port, "mode", "tap"])?;
        self.ip(&["link", "set", &port, "master", "switch", "up"])?;
        Ok(port)
    }

    fn namespace(&self) -> PathBuf {
        PathBuf::from("/run/netns").join(&self.name)
    }

    fn build(&self, build: &QemuBuild, port: &str) -> anyhow::Result<QemuBuild> {
        build_within(&self.name, &self.place.file(port), build)
    }

    /// The same godwit on a host whose machines are in this network.
    #[must_use]
    pub fn place(&self, godwit: &Godwit) -> Godwit {
        godwit.in_network(self.namespace())
    }

    /// Starts to ping the guest, every 5 ms.
    ///
    /// # Errors
    /// When there is no socket to be had.
    pub fn ping(&self) -> anyhow::Result<Pings> {
        Pings::start(&self.namespace(), GUEST.host)
    }

    /// Starts to talk with the guest over a connection.
    ///
    /// # Errors
    /// When the network is gone.
    pub fn talk(&self) -> anyhow::Result<Talk> {
        Talk::start(&self.namespace(), GUEST.host)
    }

    /// Starts to write to a Redis in the guest.
    #[must_use]
    pub fn redis(&self) -> RedisClient {
        RedisClient::start(&self.namespace(), GUEST.host)
    }

    fn ip(&self, arguments: &[&str]) -> anyhow::Result<()> {
        tool("ip", &[&["-n", &self.name], arguments].concat())
    }
}

/// The same machine with a card on its netdev `net`.
fn with_card(mut config: VmConfig) -> VmConfig {
    config.guest.address = Some(GUEST);
    // Where the guest on KVM finds it.
    let place = match config.accelerator {
        Accelerator::Kvm => ",disable-modern=on,disable-legacy=off,addr=09.0",
        _ => "",
    };
    config.with_extra(&["-device", &format!("virtio-net-pci,netdev=net,mac={MAC}{place}")])
}

impl Drop for Lan {
    fn drop(&mut self) {
        remove_namespace(&self.name);
    }
}
