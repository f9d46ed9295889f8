//! The emulated link does what it is told: pings take as long, as many are lost, and TCP carries as
//! much as under a token bucket of the same rate.
//!
//! Needs root; without it, each test says that it is skipped.
#![allow(clippy::unwrap_used)]

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::time::Duration;

use godwit_testbed::{Conditions, EmulatedLink, Heard, SlowLink, skip};
use godwit_units::Rate;

const LIMIT: Duration = Duration::from_secs(20);

fn link(test: &str, conditions: &Conditions) -> Option<EmulatedLink> {
    if !rustix::process::geteuid().is_root() || !Path::new("/dev/net/tun").exists() {
        skip(test, "it needs root, and /dev/net/tun");
        return None;
    }
    Some(EmulatedLink::create(conditions).unwrap())
}

fn heard(link: &EmulatedLink, count: usize) -> Heard {
    let pings = link.ping().unwrap();
    pings.await_answers(count, LIMIT).unwrap();
    pings.finish().unwrap()
}

/// How long each took; in milliseconds, the shortest first. Nothing where some were lost or stay
/// under way for much longer, so that which answer belongs to which question is not known.
fn round_trips(heard: &Heard) -> Option<Vec<f64>> {
    let under_way = heard.asked.len() - heard.answered.len();
    let pairs = heard.asked.iter().zip(&heard.answered);
    let mut times: Vec<f64> =
        pairs.map(|(asked, answered)| (*answered - *asked).as_secs_f64() * 1e3).collect();
    times.sort_by(f64::total_cmp);
    (under_way < 20).then_some(times)
}

/// Looks at the shortest round trip over `link`, and at those that 5, 50 and 95 of a hundred do not
/// exceed, in up to ten tries, until `rule` says yes: a machine that is held up makes them longer.
fn in_one_try(link: &EmulatedLink, count: usize, rule: impl Fn([f64; 4]) -> bool) {
    let mut seen = Vec::new();
    for _ in 0..10 {
        let Some(times) = round_trips(&heard(link, count)) else {
            println!("many are lost, or under way for long");
            continue;
        };
        let of = [0, 5, 50, 95].map(|percent| times[times.len() * percent / 100]);
        println!("round trips: {of:.2?} ms (the shortest, and 5, 50 and 95 of a hundred)");
        if rule(of) {
            return;
        }
        seen.push(of);
    }
    panic!("{seen:?}");
}

#[test]
fn a_round_trip_takes_twice_the_delay() {
    let delay = Duration::from_millis(20);
    let conditions = Conditions { delay, ..Conditions::default() };
    let Some(link) = link("a_round_trip_takes_twice_the_delay", &conditions) else { return };
    in_one_try(&link, 100, |[shortest, _, middle, _]| {
        // Each way the emulator delivers by up to 50 us early what is due with something else.
        assert!(shortest >= 39.9, "{shortest}");
        middle < 45.0
    });
}

#[test]
fn jitter_makes_some_round_trips_longer() {
    let (delay, jitter) = (Duration::from_millis(5), Duration::from_millis(4));
    let conditions = Conditions { delay, jitter, ..Conditions::default() };
    let Some(link) = link("jitter_makes_some_round_trips_longer", &conditions) else { return };
    in_one_try(&link, 200, |[_, low, middle, high]| {
        assert!(low >= 10.0 && middle >= 13.0 && high >= 15.0, "{low} {middle} {high}");
        low < 14.0 && middle < 17.0 && high < 25.0
    });
}

#[test]
fn as_many_packets_are_lost_as_it_is_told() {
    let conditions = Conditions::default().with_loss(0.1);
    let Some(link) = link("as_many_packets_are_lost_as_it_is_told", &conditions) else { return };
    let heard = heard(&link, 500);
    // Question or answer: 1 - 0.9².
    let share = heard.lost(heard.asked[0]) as f64 / heard.asked.len() as f64;
    println!("lost: {:.1} %", share * 100.0);
    assert!((0.13..0.25).contains(&share), "{share}");
}

const TRIES: u32 = 3;

/// The most of some tries: a machine that is at work makes it less, and hardly ever more (a link
/// that was held up makes good what it owes when the time has begun).
fn most(throughput: impl Fn() -> Rate) -> Rate {
    let tries = (0..TRIES).map(|_| throughput().bytes_per_second());
    Rate::from_bytes_per_second(tries.fold(0.0, f64::max))
}

#[test]
fn tcp_carries_what_it_carries_under_a_token_bucket() {
    const TEST: &str = "tcp_carries_what_it_carries_under_a_token_bucket";
    let rate = Rate::from_bytes_per_second(200e6 / 8.0);
    let Some(link) = link(TEST, &Conditions::new(rate, Duration::from_millis(2))) else { return };
    let [start, time] = [500, 1500].map(Duration::from_millis);
    let carried = most(|| link.throughput(start, time).unwrap());
    let share = carried.bytes_per_second() / rate.bytes_per_second();
    let used = link.cpu_time().unwrap().as_secs_f64() / (TRIES * (start + time)).as_secs_f64();
    println!(
        "carried: {} of {}, a processor by {:.1} %",
        carried.in_bits(),
        rate.in_bits(),
        used * 100.0
    );
    // 1448 bytes of a packet of 1514 are data, 0.956 of all; were headers free, it would be 1.
    assert!((0.85..0.975).contains(&share), "{share}");
    assert!(link.carried().unwrap().0 > (rate.bytes_per_second() * 1.5) as u64);

    let bucket = match SlowLink::create(rate) {
        Ok(bucket) => most(|| bucket.throughput(start, time).unwrap()),
        Err(why) => return skip(TEST, format_args!("the comparison with tbf: {why:#}")),
    };
    let ratio = carried.bytes_per_second() / bucket.bytes_per_second();
    println!("under a token bucket: {}", bucket.in_bits());
    assert!((0.9..1.1).contains(&ratio), "{carried} {bucket}");
}

#[test]
fn what_is_lost_of_large_packets_is_made_good_and_nothing_else_is_harmed() {
    const TEST: &str = "what_is_lost_of_large_packets_is_made_good_and_nothing_else_is_harmed";
    let rate = Rate::from_bytes_per_second(400e6 / 8.0);
    let conditions = Conditions::new(rate, Duration::from_millis(2)).with_loss(0.01);
    let Some(link) = link(TEST, &conditions) else { return };
    let (near, far) = (link.near(), link.far());
    let listener = far.within(|| Ok(TcpListener::bind((far.address(), 0))?)).unwrap();
    let to = (far.address(), listener.local_addr().unwrap().port());
    let sent: Vec<u8> = (0..2 << 20).flat_map(|number: u32| number.to_le_bytes()).collect();
    let received = std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut stream = near.within(|| Ok(TcpStream::connect(to)?)).unwrap();
            stream.write_all(&sent).unwrap();
        });
        let mut received = Vec::new();
        listener.accept().unwrap().0.read_to_end(&mut received).unwrap();
        received
    });
    assert!(received == sent, "{} bytes of {} are there, or others", received.len(), sent.len());
    let again = link.carried().unwrap().0 as f64 / sent.len() as f64;
    println!("carried for each byte that arrived: {again:.3}");
    assert!(again > 1.01, "some of it was sent twice: {again}");
}

#[test]
fn the_emulator_itself_carries_more_than_any_link_that_it_stands_for() {
    const TEST: &str = "the_emulator_itself_carries_more_than_any_link_that_it_stands_for";
    let Some(link) = link(TEST, &Conditions::default()) else { return };
    let [start, time] = [300, 1000].map(Duration::from_millis);
    let carried = link.throughput(start, time).unwrap();
    println!("the emulator's own limit: {}", carried.in_bits());
    assert!(carried.bytes_per_second() > 1e9 / 8.0, "{}", carried.in_bits());
}

#[test]
fn nothing_is_left_of_a_link() {
    let Some(link) = link("nothing_is_left_of_a_link", &Conditions::default()) else { return };
    let namespaces = [link.near(), link.far()].map(|end| end.namespace());
    assert!(namespaces.iter().all(|namespace| namespace.exists()));
    drop(link);
    assert!(namespaces.iter().all(|namespace| !namespace.exists()));
}
