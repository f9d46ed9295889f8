//! Copies of what an interface is given, and what is put into one, on a pair of interfaces of the
//! kernel's own: which packets those are.
#![allow(clippy::unwrap_used)]

use std::fs::File;
use std::net::{Ipv4Addr, UdpSocket};
use std::time::{Duration, Instant};

use godwit_tap::{Inlet, Mac, Outlet, Packet};
use godwit_testbed::{enter_namespace, skip, tool};

const CARD: Mac = Mac([0x52, 0x54, 0, 1, 2, 3]);
/// Long enough for what is on its way within a host.
const LIMIT: Duration = Duration::from_secs(10);
/// In which what would come has come.
const MOMENT: Duration = Duration::from_millis(50);

fn ip(arguments: &[&str]) -> bool {
    tool("ip", arguments).is_ok()
}

/// A network namespace, which goes with it.
struct Namespace(String);

impl Drop for Namespace {
    fn drop(&mut self) {
        ip(&["netns", "del", &self.0]);
    }
}

/// A namespace in which `near` and `far` are two ends of one cable, and `near.5` is its VLAN 5,
/// where the kernel has such; the calling thread is in it from then on.
fn enter_a_new_one(test: &str) -> Option<Namespace> {
    let name = format!("gwtap{}", std::process::id());
    if !ip(&["netns", "add", &name]) {
        skip(test, "no network namespace can be made here");
        return None;
    }
    let namespace = Namespace(name);
    let within = |words: &str| {
        let words: Vec<&str> = words.split(' ').collect();
        ip(&[&["-n", &namespace.0], &words[..]].concat())
    };
    assert!(within("link add near type veth peer name far"));
    assert!(within("link set near up") && within("link set far up"));
    assert!(within("address add 198.18.0.1/24 dev near"));
    // The card, and two whose addresses differ from its in one half each.
    for (host, mac) in [(2, "00:01:02:03"), (3, "00:01:02:04"), (4, "01:01:02:03")] {
        let there = format!("neighbour add 198.18.0.{host} lladdr 52:54:{mac} dev near");
        assert!(within(&there));
    }
    if within("link add link near name near.5 type vlan id 5") {
        assert!(within("link set near.5 up") && within("address add 198.19.0.1/24 dev near.5"));
        assert!(within("neighbour add 198.19.0.2 lladdr 52:54:00:01:02:03 dev near.5"));
    }
    let path = format!("/run/netns/{}", namespace.0);
    enter_namespace(&File::open(path).unwrap()).unwrap();
    Some(namespace)
}

/// A packet for the card that is told from others by its bytes.
fn packet(number: u8) -> Packet {
    let mut bytes = vec![0; 10];
    bytes.extend(CARD.0);
    bytes.extend([2, 0, 0, 0, 0, 1, 0x88, 0xb5]);
    bytes.extend([number; 46]);
    Packet::of(bytes).unwrap()
}

/// The last bytes of the next packet that comes, as far as one comes within `wait`.
fn next(outlet: &mut Outlet, wait: Duration) -> Option<u8> {
    let until = Instant::now() + wait;
    loop {
        if let Some(packet) = outlet.take().unwrap() {
            return packet.bytes().last().copied();
        }
        if Instant::now() >= until {
            return None;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn what_a_network_sends_to_a_card_is_copied_and_nothing_else() {
    // Mutations: of the filter each of its five tests; it copies before it is open.
    let test = "what_a_network_sends_to_a_card_is_copied_and_nothing_else";
    let Some(_namespace) = enter_a_new_one(test) else { return };
    let mut outlet = Outlet::of("near", CARD).unwrap();
    let [near, far] = ["near", "far"].map(|name| Inlet::of(name).unwrap());
    let network = UdpSocket::bind("198.18.0.1:0").unwrap();
    let send = |host: u8, number: u8| {
        network.send_to(&[number; 600], (Ipv4Addr::new(198, 18, 0, host), 9)).unwrap();
    };
    send(2, 1);
    assert_eq!(next(&mut outlet, MOMENT), None, "it is not open");

    outlet.open().unwrap();
    // What comes from the other end, is for others, was put in, or has its tag beside its bytes.
    far.put(&packet(2)).unwrap();
    for other in [3, 4] {
        send(other, 3);
    }
    near.put(&packet(4)).unwrap();
    match UdpSocket::bind("198.19.0.1:0") {
        Ok(tagged) => drop(tagged.send_to(&[5; 600], "198.19.0.2:9").unwrap()),
        Err(_) => skip("a tag beside the bytes", "this kernel has no VLANs"),
    }
    send(2, 6);
    assert_eq!(next(&mut outlet, LIMIT), Some(6));
    assert_eq!(next(&mut outlet, MOMENT), None);
    assert!(Outlet::of("nothing", CARD).is_err() && Inlet::of("nothing").is_err());
}
