//! The guest's cards that are on taps, and what is sent to them while it stands still.
//!
//! A QEMU whose guest is stopped takes one packet more from each interface, keeps it to itself, and
//! leaves the others where they are (`tap_send` in net/tap.c, `qemu_net_queue_send` in
//! net/queue.c): all of them are lost with it. [`Outlets`] have copies, and [`Inlets`] put
//! them into the interfaces where the guest goes on.
//!
//! Keeps two promises: nothing is copied but for as long as a guest is being handed over, and
//! nothing of the interfaces is changed. What cannot be copied is lost as it is without.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::os::fd::AsFd;
use std::thread;
use std::time::{Duration, Instant};

use godwit_engine::vm::VmError;
use godwit_tap::{Inlet, Mac, Outlet, Packet};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use crate::monitor::commands::Human;
use crate::monitor::{Monitor, QmpError};
use crate::process::descriptors;

const _: () = assert!(godwit_tap::PACKET_LIMIT <= godwit_wire::PACKET_LIMIT);

/// A card, and the interface that its packets come through.
#[derive(Debug, PartialEq, Eq)]
struct Card {
    mac: Mac,
    interface: String,
}

/// What a card is connected to.
#[derive(Debug, PartialEq, Eq)]
enum Behind<'a> {
    /// The interface of this name.
    Interface(&'a str),
    /// That of this descriptor of QEMU's.
    Descriptor(i32),
}

/// The cards in the answer to `info network` that are on a tap. It has a line for each end of a
/// connection, that of a card first (`print_net_client` in net/net.c), with its address
/// (`qemu_format_nic_info_str`); the other end's says how it was opened (net/tap.c).
fn on_taps(text: &str) -> Vec<(Mac, Behind<'_>)> {
    let pairs = text.lines().zip(text.lines().skip(1));
    let found = pairs.filter_map(|(card, behind)| {
        // On a hub the end of a line is not that of the line before.
        let mac = mac_in(card).filter(|_| !card.trim_start().starts_with('\\'))?;
        let (_, tap) = behind.trim_start().strip_prefix('\\')?.split_once(",type=tap,")?;
        let (kind, value) = tap.trim().split(',').next()?.split_once('=')?;
        let behind = match kind {
            "ifname" => Behind::Interface(value),
            "fd" => Behind::Descriptor(value.parse().ok()?),
            // A helper has made it, and QEMU tells no name.
            _ => return None,
        };
        Some((mac, behind))
    });
    found.collect()
}

/// The address of the card that this line of the answer to `info network` is of, if it is of one.
pub(crate) fn mac_in(line: &str) -> Option<Mac> {
    let (_, card) = line.split_once(",type=nic,")?;
    card.trim().split(',').find_map(|word| word.strip_prefix("macaddr="))?.parse().ok()
}

/// The interfaces of the taps that process `pid` has open, by their descriptors, as the kernel has
/// them (`tun_chr_show_fdinfo` in its drivers/net/tun.c).
fn taps_of(pid: i32) -> BTreeMap<i32, String> {
    let taps = descriptors(pid).into_iter().flatten().filter_map(|descriptor| {
        let number = descriptor.number;
        let text = fs::read_to_string(format!("/proc/{pid}/fdinfo/{number}")).ok()?;
        let name = text.lines().find_map(|line| line.strip_prefix("iff:"))?.trim();
        (!name.is_empty()).then(|| (number, name.to_owned()))
    });
    taps.collect()
}

/// The cards of the guest in QEMU `pid` that are on a tap which it has open. What it says alone
/// might be of any interface.
fn cards(qmp: &mut dyn Monitor, pid: i32) -> Result<Vec<Card>, QmpError> {
    let network = qmp.run_if_known(&Human { command_line: "info network" })?.unwrap_or_default();
    let taps = taps_of(pid);
    let found = on_taps(&network).into_iter().filter_map(|(mac, behind)| {
        let interface = match behind {
            Behind::Interface(name) => taps.values().find(|tap| *tap == name),
            Behind::Descriptor(number) => taps.get(&number),
        };
        if interface.is_none() {
            tracing::info!(%mac, "QEMU has no such tap open: packets that come late are lost");
        }
        Some(Card { mac, interface: interface?.clone() })
    });
    Ok(found.collect())
}

/// Does `work` in the network namespace of process `pid`, where its interfaces are. To enter
/// another than that of this thread takes CAP_SYS_ADMIN.
fn within<T: Send>(pid: i32, work: impl FnOnce() -> io::Result<T> + Send) -> io::Result<T> {
    let theirs = format!("/proc/{pid}/ns/net");
    if fs::read_link(&theirs)? == fs::read_link("/proc/thread-self/ns/net")? {
        return work();
    }
    let namespace = File::open(theirs)?;
    thread::scope(|scope| {
        let inside =
            thread::Builder::new().name("network".to_owned()).spawn_scoped(scope, || {
                move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network))?;
                work()
            })?;
        let panicked = |_| Err(io::Error::other("a thread of godwit's has panicked"));
        inside.join().unwrap_or_else(panicked)
    })
}

/// What `make` makes of each card of the guest in QEMU `pid`, as far as it can.
fn of_each<T: Send>(
    qmp: &mut dyn Monitor,
    pid: i32,
    make: impl Fn(&Card) -> io::Result<T> + Sync,
) -> Vec<(Mac, T)> {
    let cards = cards(qmp, pid).unwrap_or_else(|error| {
        tracing::info!(%error, "the guest's cards are not known");
        Vec::new()
    });
    let made = cards.into_iter().filter_map(|card| match within(pid, || make(&card)) {
        Ok(made) => Some((card.mac, made)),
        Err(error) => {
            let Card { mac, interface } = card;
            tracing::info!(%mac, interface, %error, "packets that come late are lost");
            None
        }
    });
    made.collect()
}

/// What is sent to the cards of a guest from right before it is stopped on.
#[derive(Debug)]
pub(crate) struct Outlets(Vec<Outlet>);

impl Outlets {
    /// Of the guest in QEMU `pid`; nothing is kept yet.
    pub(crate) fn of(qmp: &mut dyn Monitor, pid: i32) -> Self {
        let outlets = of_each(qmp, pid, |card| Outlet::of(&card.interface, card.mac));
        Self(outlets.into_iter().map(|(_, outlet)| outlet).collect())
    }

    /// From now on it is kept.
    pub(crate) fn open(&mut self) {
        self.0.retain(|outlet| match outlet.open() {
            Ok(()) => true,
            Err(error) => {
                tracing::info!(%error, "packets that come late are lost");
                false
            }
        });
    }

    /// The next packet, waiting up to `wait`.
    pub(crate) fn next(&mut self, wait: Duration) -> Option<Vec<u8>> {
        let until = Instant::now() + wait;
        loop {
            let mut found = None;
            self.0.retain_mut(|outlet| {
                if found.is_some() {
                    return true;
                }
                match outlet.take() {
                    Ok(packet) => {
                        found = packet;
                        true
                    }
                    // It has gone, and has nothing more.
                    Err(_) => false,
                }
            });
            if let Some(packet) = found {
                // The others are next.
                self.0.rotate_left(1);
                return Some(packet.into_bytes());
            }
            let left = until.saturating_duration_since(Instant::now());
            if self.0.is_empty() || left.is_zero() {
                return None;
            }
            let mut fds: Vec<_> =
                self.0.iter().map(|outlet| PollFd::new(outlet, PollFlags::IN)).collect();
            // Whatever comes of it, it is looked again.
            let _ = poll(&mut fds, Timespec::try_from(left).ok().as_ref());
        }
    }
}

/// The ways to the cards of a guest that has come.
#[derive(Debug)]
pub(crate) struct Inlets(Vec<(Mac, Inlet)>);

impl Inlets {
    /// Of the guest in QEMU `pid`.
    pub(crate) fn of(qmp: &mut dyn Monitor, pid: i32) -> Self {
        Self(of_each(qmp, pid, |card| Inlet::of(&card.interface)))
    }

    /// Puts a packet on its way to the card that it is for.
    pub(crate) fn put(&self, packet: Vec<u8>) -> Result<(), VmError> {
        let packet = Packet::of(packet).ok_or("it is no packet")?;
        let to = packet.to();
        // The guest may have given the only one another address.
        let inlet = match &self.0[..] {
            [(_, only)] => Some(only),
            several => several.iter().find(|(mac, _)| *mac == to).map(|(_, inlet)| inlet),
        };
        let inlet = inlet.ok_or_else(|| format!("there is no way to a card {to} here"))?;
        Ok(inlet.put(&packet)?)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::monitor::stand_in::StandIn;

    #[test]
    fn cards_on_taps_are_found_and_no_others() {
        let network = "\
hub 0\r
 \\ hub0port1: tap0: index=0,type=tap,ifname=tap9,script=no,downscript=no\r
 \\ hub0port0: e1000.0: index=0,type=nic,model=e1000,macaddr=52:54:00:12:34:56\r
net0: index=0,type=nic,model=virtio-net-pci,macaddr=52:54:00:00:00:01\r
 \\ host0: index=0,type=tap,ifname=tap0,script=no,downscript=/macaddr=52:54:00:00:00:09\r
net1: index=0,type=nic,model=virtio-net-pci,macaddr=52:54:00:00:00:02\r
 \\ host1: index=0,type=tap,fd=31\r
net1: index=1,type=nic,\r
 \\ host1: index=1,type=tap,fd=32\r
net2: index=0,type=nic,model=e1000,macaddr=52:54:00:00:00:03\r
 \\ host2: index=0,type=tap,helper=/usr/lib/qemu/qemu-bridge-helper,br=br0\r
net3: index=0,type=nic,model=e1000,macaddr=52:54:00:00:00:04\r
 \\ host3: index=0,type=user,net=10.0.2.0,restrict=off\r
net4: index=0,type=nic,model=e1000,macaddr=52:54:00:00:00:05\r
net5: index=0,type=nic,model=e1000,macaddr=nothing\r
 \\ host5: index=0,type=tap,ifname=tap5,script=no,downscript=no\r
";
        let mac = |last| Mac([0x52, 0x54, 0, 0, 0, last]);
        let expected = [(mac(1), Behind::Interface("tap0")), (mac(2), Behind::Descriptor(31))];
        assert_eq!(on_taps(network), expected);
        assert!(on_taps("").is_empty());
    }

    #[test]
    fn what_is_no_packet_and_what_is_for_nobody_is_refused() {
        let inlets = Inlets(Vec::new());
        assert_eq!(inlets.put(vec![0; 3]).unwrap_err().to_string(), "it is no packet");
        let nobody = inlets.put(vec![0; 60]).unwrap_err().to_string();
        assert_eq!(nobody, "there is no way to a card 00:00:00:00:00:00 here");
    }

    #[test]
    fn what_a_qemu_says_alone_is_no_card() {
        let line = "n: index=0,type=nic,model=e1000,macaddr=52:54:00:12:34:56\r\n \\ t: index=0,";
        for behind in ["type=tap,ifname=eth0,script=no", "type=tap,fd=0"] {
            let mut qmp = StandIn::new(&[("info network", json!(format!("{line}{behind}\r\n")))]);
            assert_eq!(cards(&mut qmp, std::process::id().cast_signed()).unwrap(), []);
        }
    }

    #[test]
    fn without_a_card_nothing_is_waited_for() {
        let mut outlets = Outlets(Vec::new());
        outlets.open();
        let began = Instant::now();
        assert_eq!(outlets.next(Duration::from_secs(60)), None);
        assert!(began.elapsed() < Duration::from_secs(30));
    }
}
