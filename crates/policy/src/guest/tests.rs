//! The model learns what a guest does, and foresees what rounds will do.

use super::*;

fn looks(guest: &mut Guest, pages: f64, rate: f64, speed: f64, from: f64, count: u32, throttle: f64) -> f64 {
    let mut dirty = from;
    for _ in 0..count {
        dirty = pages - (pages - dirty) * (-speed * rate * 0.1_f64).exp();
        guest.look(&[dirty as u32], Duration::from_millis(100), throttle);
    }
    dirty
}

#[test]
fn working_set_and_rate_are_learned_from_a_few_looks() {
    let mut guest = Guest { size: 4096.0, ..Guest::default() };
    looks(&mut guest, 2000.0, 3.0, 1.0, 0.0, 8, 0.0);
    let (pages, rate) = guest.segments[0].line(4096.0).unwrap();
    assert!((1900.0..2200.0).contains(&pages), "{pages}");
    assert!((2.5..3.3).contains(&rate), "{rate}");
}

#[test]
fn what_a_throttle_leaves_is_measured() {
    let mut guest = Guest::default();
    looks(&mut guest, 4000.0, 10.0, 1.0, 0.0, 10, 0.0);
    guest.look(&[0], Duration::from_millis(100), 0.99);
    // Told 99 %, the mechanism leaves 3 %.
    looks(&mut guest, 4000.0, 10.0, 0.03, 0.0, 10, 0.99);
    let speed = guest.speed(0.99);
    assert!((0.025..0.035).contains(&speed), "{speed}");
}

#[test]
fn a_guest_that_rewrites_its_pages_is_not_slowed_by_a_mild_throttle() {
    let hot = [Class { pages: 65_536.0, rate: 11.4, dirty: 65_536.0 }];
    let link = Link { pages: 32_768.0, idle: 0.0, at_once: false, lead: 0.0 };
    assert_eq!(time_to_finish(&hot, 0.0, 1.0, link, 9000.0), None);
    assert_eq!(time_to_finish(&hot, 0.0, 0.2, link, 9000.0), None);
    let strong = time_to_finish(&hot, 0.0, 0.01, link, 9000.0).unwrap();
    assert!((1.9..2.2).contains(&strong), "{strong}");
}

#[test]
fn a_synchronisation_at_once_costs_more_than_one_in_pieces() {
    let class = [Class { pages: 1e6, rate: 0.1, dirty: 1e6 }];
    let pieces = Link { pages: 2e5, idle: 0.0, at_once: false, lead: 0.0 };
    let once = Link { idle: 0.07, at_once: true, ..pieces };
    let pieces = time_to_finish(&class, 0.0, 1.0, pieces, 1e4).unwrap();
    assert!(time_to_finish(&class, 0.0, 1.0, once, 1e4).is_none_or(|once| once > pieces));
}

#[test]
fn rounds_come_to_the_balance_of_the_formula() {
    // So many pages that hardly any is written twice: 100,000 a second, on a link of 250,000.
    let (pages, writes, bandwidth, gap) = (1e9, 1e5, 2.5e5, 0.06);
    let mut classes = vec![Class { pages, rate: writes / pages, dirty: 1e6 }];
    let link = Link { pages: bandwidth, idle: gap, at_once: false, lead: 0.0 };
    let mut time = 0.0;
    for _ in 0..40 {
        let total = classes[0].dirty;
        time = round(&mut classes, 0.0, total, 1.0, link);
    }
    // t = D·x / (B − D), and the round takes x + t.
    let balanced = writes * gap / (bandwidth - writes);
    assert!((time - gap - balanced).abs() < 0.02 * balanced, "{time} for {}", gap + balanced);
}
