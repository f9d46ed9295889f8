//! The model learns what a guest does, and foresees what rounds will do.

use super::*;

fn looks(
    guest: &mut Guest,
    pages: f64,
    rate: f64,
    speed: f64,
    from: f64,
    count: u32,
    throttle: f64,
) -> f64 {
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

/// Looks at one segment, a second apart, on the line of 1,024 pages that are each written 2/3 times
/// a second: between two looks half of what is clean becomes dirty.
const ON_A_LINE: [u32; 5] = [0, 512, 768, 896, 960];

const SECOND: Duration = Duration::from_secs(1);

/// A guest that has seen `looks` of one segment.
fn seen(looks: &[u32]) -> Guest {
    let mut guest = Guest::default();
    looks.iter().for_each(|look| guest.look(&[*look], SECOND, 0.0));
    guest
}

fn near(found: f64, expected: f64) -> bool {
    (found - expected).abs() <= 1e-3 * expected.abs()
}

/// The line of the first segment.
fn line(guest: &Guest) -> (f64, f64) {
    let (pages, rate) = guest.segments[0].line(guest.size as f32).unwrap();
    (f64::from(pages), f64::from(rate))
}

#[test]
fn growth_over_level_is_a_line_of_which_both_ends_are_found() {
    for count in 3..=5 {
        let (pages, rate) = line(&seen(&ON_A_LINE[..count]));
        assert!(near(pages, 1024.0) && near(rate, 2.0 / 3.0), "{count} looks: {pages} {rate}");
    }
    // With a single growth there is no line yet: it may be all of the segment. 512 a second at a
    // level of 256.
    let (pages, rate) = line(&seen(&ON_A_LINE[..2]));
    assert!(near(pages, 4096.0) && near(rate, 512.0 / 3840.0), "{pages} {rate}");
}

#[test]
fn looks_that_are_closer_tell_the_same() {
    let mut guest = Guest::default();
    ON_A_LINE.iter().for_each(|look| guest.look(&[*look], SECOND / 10, 0.0));
    let (pages, rate) = line(&guest);
    assert!(near(pages, 1024.0) && near(rate, 20.0 / 3.0), "{pages} {rate}");
    // Within a millisecond nothing can be told.
    guest.look(&[1024], Duration::from_micros(900), 0.0);
    assert_eq!((line(&guest), guest.segments[0].last), ((pages, rate), 960.0));
}

#[test]
fn a_harvest_between_looks_says_nothing() {
    let mut guest = seen(&ON_A_LINE);
    let before = line(&guest);
    guest.look(&[100], SECOND, 0.0);
    assert_eq!(line(&guest), before);
    // From there on it grows on the same line: half of 924.
    guest.look(&[562], SECOND, 0.0);
    let (pages, rate) = line(&guest);
    assert!(near(pages, 1024.0) && near(rate, 2.0 / 3.0), "{pages} {rate}");
}

#[test]
fn a_segment_that_was_never_written_has_no_line() {
    let guest = seen(&[0, 0, 0, 0]);
    assert_eq!(guest.segments[0].line(4096.0), None);
    assert_eq!(guest.classes(), []);
    // The time before it was first written does not count.
    let (pages, rate) = line(&seen(&[0, 0, 0, 0, 512, 768, 896]));
    assert!(near(pages, 1024.0) && near(rate, 2.0 / 3.0), "{pages} {rate}");
}

#[test]
fn a_line_has_no_more_pages_than_its_segment_and_no_fewer_than_were_seen() {
    // The growth does not fall with the level: all of the segment, whatever that is.
    let steady = seen(&[0, 300, 600, 900, 1200]);
    let (pages, rate) = steady.segments[0].line(2000.0).unwrap();
    assert!(pages == 2000.0 && rate > 0.0, "{pages} {rate}");
    assert_eq!(steady.segments[0].line(1000.0).unwrap().0, 1200.0, "more were seen");
    // On its line there would be 1,024 pages, and the segment has only 1,000.
    assert_eq!(seen(&ON_A_LINE).segments[0].line(1000.0).unwrap().0, 1000.0);
}

#[test]
fn what_a_segment_told_while_it_grew_is_kept_when_it_is_dirty_all_over() {
    let mut guest = seen(&[0, 512, 768, 896, 960, 992, 1008, 1016, 1020, 1022, 1023, 1024]);
    let (_, before) = line(&guest);
    (0..50).for_each(|_| guest.look(&[1024], SECOND, 0.0));
    let (pages, rate) = line(&guest);
    assert!((1024.0..1100.0).contains(&pages), "{pages}");
    assert!(rate > 0.8 * before, "{rate} of {before}");
}

#[test]
fn a_guest_that_begins_to_write_more_is_followed() {
    // Twice as many pages, each as often: the gaps halve to 2,048.
    let mut guest = seen(&ON_A_LINE);
    for _ in 0..4 {
        [0, 1024, 1536, 1792, 1920].iter().for_each(|look| guest.look(&[*look], SECOND, 0.0));
    }
    let (pages, rate) = line(&guest);
    assert!((1920.0..2250.0).contains(&pages), "{pages}");
    assert!((0.5..0.8).contains(&rate), "{rate}");
}

#[test]
fn weights_fade_by_three_tenths_of_what_is_new() {
    let mut segment = Segment::default();
    segment.learn(100.0, 10.0, 5.0);
    segment.learn(300.0, 40.0, 0.5);
    // 1 · (1 − 0.15) + 0.5, and the sums alike.
    let sums = [segment.weight, segment.d, segment.g, segment.dd, segment.dg];
    let expected = [1.35, 0.85 * 100.0 + 150.0, 0.85 * 10.0 + 20.0, 53_500.0, 6850.0];
    for (found, expected) in sums.into_iter().zip(expected) {
        assert!(near(found.into(), expected), "{sums:?}");
    }
    segment.learn(0.0, 0.0, 0.0);
    assert!(near(segment.weight.into(), 1.35 * 0.997 + 0.01), "{}", segment.weight);
}

#[test]
fn a_look_weighs_what_grew_of_what_there_is() {
    let mut guest = seen(&[0, 512]);
    assert_eq!(guest.segments[0].weight, 1.0);
    // 256 of 768.
    guest.look(&[768], SECOND, 0.0);
    assert!(near(guest.segments[0].weight.into(), 0.9 + 1.0 / 3.0));
    // 50 of the 768 that there were before the harvest: 0.065.
    let before = f64::from(guest.segments[0].weight);
    guest.look(&[100], SECOND, 0.0);
    guest.look(&[150], SECOND, 0.0);
    let share = 50.0 / 768.0;
    let weight = f64::from(guest.segments[0].weight);
    assert!((weight - before * (1.0 - 0.3 * share) - share).abs() < 1e-3, "{weight}");
}

#[test]
fn nobody_having_looked_pages_had_half_of_the_round_to_become_dirty() {
    let mut guest = Guest { size: 1e6, ..Guest::default() };
    guest.look_at_all(1000, 4 * SECOND, 0.0);
    // 1,000 in 2 s, at a level of 500 on average.
    let (pages, rate) = line(&guest);
    assert!(pages == 1e6 && near(rate, 500.0 / (1e6 - 500.0)), "{pages} {rate}");
    assert_eq!(guest.segments[0].last, 1000.0);
    // A throttled guest says nothing of its own pace, nor does a round without length.
    let before = line(&guest);
    guest.look_at_all(3000, 4 * SECOND, 0.5);
    guest.look_at_all(2000, Duration::ZERO, 0.0);
    assert_eq!((line(&guest), guest.segments[0].last), (before, 2000.0));
    // Over rounds of different lengths a line shows: 1,000 / 2 s at 500, 1,500 / 6 s at 750.
    guest.look_at_all(1500, 12 * SECOND, 0.0);
    let (pages, rate) = line(&guest);
    assert!(near(pages, 1500.0), "{pages}: it would be 1,000, but more were seen");
    assert!(rate > 0.0);
    // Looks at segments begin anew.
    guest.look(&[1, 2], SECOND, 0.0);
    assert_eq!(guest.segments.len(), 2);
    guest.look_at_all(5, SECOND, 0.0);
    assert_eq!(guest.segments.len(), 1);
}

#[test]
fn what_is_held_to_a_rate_teaches_nothing() {
    let mut guest = seen(&ON_A_LINE);
    let before = line(&guest);
    guest.note(&[970]);
    assert_eq!(
        (line(&guest), guest.segments[0].last, guest.segments[0].top),
        (before, 970.0, 970.0)
    );
    guest.note(&[10]);
    assert_eq!((guest.segments[0].last, guest.segments[0].top), (10.0, 970.0));
    guest.note(&[1, 2, 3]);
    assert_eq!(guest.segments.len(), 3);
}

#[test]
fn a_segments_size_is_its_part_of_all_memory() {
    let mut guest = Guest::default();
    guest.set_memory(8000);
    assert_eq!(guest.segment_pages(), 4096.0, "of segments nothing is known yet");
    guest.look(&[0, 0, 0, 0], SECOND, 0.0);
    guest.set_memory(8000);
    assert_eq!(guest.segment_pages(), 2000.0);
    guest.set_memory(0);
    assert_eq!(guest.segment_pages(), 2000.0);
}

#[test]
fn the_speed_under_a_throttle_is_what_is_left_times_what_was_measured() {
    let speed = |gain: f64, throttle: f64| Guest { gain, ..Guest::default() }.speed(throttle);
    assert_eq!([speed(3.0, 0.0), speed(1.0, 0.75), speed(3.0, 0.75)], [1.0, 0.25, 0.75]);
    assert_eq!(speed(6.0, 0.75), 1.0, "never above what it is without one");
}

#[test]
fn a_throttles_effect_is_growth_seen_over_growth_expected() {
    let mut guest = Guest::default();
    // 60 of 120 pages that half of its speed would leave: too few to tell, until 128 are expected.
    guest.learn_gain(60.0, 128.0, 0.5);
    assert_eq!((guest.gain, guest.measured), (1.0, false));
    guest.learn_gain(36.0, 128.0, 0.5);
    assert_eq!((guest.gain, guest.measured), (0.75, true));
    assert_eq!(guest.pending, (0.0, 0.0, 0.5));
    // From then on four tenths of what is new: 0.6 · 0.75 + 0.4 · 1.75.
    guest.learn_gain(350.0, 400.0, 0.5);
    assert!(near(guest.gain, 1.15), "{}", guest.gain);
    // What was seen under another throttle does not count.
    guest.learn_gain(1000.0, 100.0, 0.5);
    guest.learn_gain(15.0, 150.0, 0.9);
    assert!(near(guest.gain, 1.15), "{}", guest.gain);
    guest.learn_gain(85.0, 850.0, 0.9);
    assert!(near(guest.gain, 0.6 * 1.15 + 0.4), "{}", guest.gain);
    // Of what is beyond belief a bound is kept.
    let bounded = |seen| {
        let mut guest = Guest::default();
        guest.learn_gain(seen, 1000.0, 0.5);
        guest.gain
    };
    assert_eq!((bounded(0.0), bounded(1e9)), (0.05, 150.0));
}

#[test]
fn growth_under_a_throttle_is_held_against_the_line() {
    let mut guest = seen(&ON_A_LINE);
    guest.look(&[0], SECOND, 0.5);
    assert!(!guest.measured, "harvested in between");
    let before = line(&guest);
    // At a level of 100 in the middle, 2/3 · 924 pages would become dirty in a second; under 50 %
    // 308 of them. 200 do.
    guest.look(&[200], SECOND, 0.5);
    assert!(near(guest.gain, 200.0 / 308.0), "{}", guest.gain);
    assert_eq!(line(&guest), before, "a line is learned from a guest that is not throttled");
    // In half of the time, half: 400 more at a level of 400.
    guest.gain = 1.0;
    guest.measured = false;
    guest.look(&[600], SECOND / 2, 0.5);
    assert!(near(guest.gain, 400.0 / (2.0 / 3.0 * 624.0 / 4.0)), "{}", guest.gain);
}

#[test]
fn segments_that_are_written_alike_make_a_class() {
    // 2/3 and 20/3 times a second; the third is dirty, and nobody has seen it grow.
    let mut guest = Guest::default();
    for look in ON_A_LINE {
        guest.look(&[look, look, look / 2, 0], SECOND, 0.0);
    }
    guest.segments[3].last = 77.0;
    let classes = guest.classes();
    assert_eq!(classes.len(), 2, "{classes:?}");
    // Two of 1,024 pages and one of 512, all at the same pace.
    assert!(near(classes[0].pages, 2560.0) && near(classes[0].rate, 2.0 / 3.0), "{classes:?}");
    assert!(near(classes[0].dirty, 960.0 + 960.0 + 480.0), "{classes:?}");
    assert_eq!(classes[1], Class { pages: 77.0, rate: 0.0, dirty: 77.0 });
}

#[test]
fn paces_of_different_octaves_are_different_classes() {
    let segment = |pages: f32, rate: f32, dirty: f32| Segment {
        last: dirty,
        top: pages,
        weight: 1.0,
        g: rate * 4096.0,
        ..Segment::default()
    };
    // Without a spread of levels all of the segment counts.
    let guest = Guest {
        segments: vec![
            segment(10.0, 1.0, 5.0),
            segment(10.0, 1.9, 10.0),
            segment(10.0, 2.0, 20.0),
            segment(10.0, 1e-6, 1.0),
            segment(10.0, 1.0 / 256.0, 1.0),
            segment(10.0, 128.0, 1.0),
            segment(10.0, 900.0, 1.0),
        ],
        ..Guest::default()
    };
    let classes = guest.classes();
    let found: Vec<(f64, f64)> =
        classes.iter().map(|class| (class.pages / 4096.0, class.dirty)).collect();
    assert_eq!(found, [(2.0, 2.0), (2.0, 15.0), (1.0, 20.0), (2.0, 2.0)]);
    assert!(near(classes[1].rate, 1.45), "the mean of both: {classes:?}");
    assert!(near(classes[3].rate, 514.0), "{classes:?}");
}

#[test]
fn more_is_never_dirty_than_a_line_has_pages() {
    let mut guest = seen(&ON_A_LINE);
    guest.segments[0].last = 5000.0;
    assert!(near(guest.classes()[0].dirty, 1024.0));
}

/// A round over `class` as it happens: a thousand parts whose turns are spread evenly, each sent as
/// it is when its turn comes. What is dirty at the end, and the seconds that it took.
fn step_by_step(class: Class, unsent: f64, speed: f64, link: Link) -> (f64, f64) {
    const PARTS: usize = 1000;
    let rate = speed * class.rate;
    let (mut low, mut high) = (0.0, 1e4);
    // The length at which as much is sent as the link carries in it.
    for _ in 0..60 {
        let time = (low + high) / 2.0;
        let sent: f64 = (0..PARTS)
            .map(|part| link.idle + (part as f64 + 0.5) / PARTS as f64 * time)
            .map(|turn| {
                (class.pages - (class.pages - class.dirty) * (-rate * turn).exp()) / PARTS as f64
            })
            .sum();
        if unsent + sent > link.pages * time { low = time } else { high = time }
    }
    let left = (0..PARTS)
        .map(|part| high - (part as f64 + 0.5) / PARTS as f64 * high)
        .map(|since| class.pages * (1.0 - (-rate * since).exp()) / PARTS as f64)
        .sum();
    (left, high + link.idle)
}

#[test]
fn a_round_in_pieces_is_as_it_happens() {
    let link = Link { pages: 1000.0, idle: 0.0, at_once: false, lead: 0.0 };
    let paused = Link { idle: 0.3, ..link };
    let class = |pages, rate, dirty| Class { pages, rate, dirty };
    for (class, unsent, speed, link) in [
        (class(1000.0, 1.0, 1000.0), 0.0, 1.0, link),
        (class(1000.0, 1.0, 200.0), 0.0, 1.0, link),
        (class(1000.0, 4.0, 200.0), 0.0, 0.1, link),
        (class(4000.0, 0.3, 100.0), 500.0, 0.5, link),
        (class(3000.0, 2.0, 1000.0), 0.0, 1.0, paused),
        (class(3000.0, 0.1, 1000.0), 700.0, 0.5, paused),
    ] {
        let (left, took) = step_by_step(class, unsent, speed, link);
        let mut classes = [class];
        let time = round(&mut classes, unsent, unsent + class.dirty, speed, link);
        assert!((time - took).abs() < 0.02 * took, "{class:?}: {time} for {took}");
        assert!((classes[0].dirty - left).abs() < 0.03 * left, "{:?} for {left}", classes[0]);
    }
}

#[test]
fn a_round_at_once_sends_what_was_dirty_and_leaves_what_became_so() {
    let link = Link { pages: 1000.0, idle: 0.5, at_once: true, lead: 0.0 };
    let mut classes = [
        Class { pages: 2000.0, rate: 0.4, dirty: 500.0 },
        Class { pages: 100.0, rate: 0.0, dirty: 100.0 },
    ];
    let time = round(&mut classes, 400.0, 1000.0, 0.5, link);
    assert_eq!(time, 1.5);
    assert!(near(classes[0].dirty, 2000.0 * (1.0 - (-0.3_f64).exp())), "{classes:?}");
    assert_eq!(classes[1].dirty, 0.0);
    // The same at full speed.
    let class = [Class { pages: 2000.0, rate: 0.4, dirty: 600.0 }];
    let (later, time) = after_round(&class, 400.0, 1.0, link);
    assert_eq!(time, 1.5);
    assert!(near(later[0].dirty, 2000.0 * (1.0 - (-0.6_f64).exp())), "{later:?}");
}

#[test]
fn the_share_that_stays_clean_is_a_mean_over_the_round() {
    assert_eq!((kept(0.0), kept(1e-9)), (1.0, 1.0));
    assert!(
        near(kept(1.0), 1.0 - (-1.0_f64).exp()) && near(kept(2.0), (1.0 - (-2.0_f64).exp()) / 2.0)
    );
    assert!((kept(1e-5) - 1.0).abs() < 1e-4);
}

#[test]
fn the_time_to_finish_is_the_sum_of_the_rounds() {
    let link = Link { pages: 1000.0, idle: 0.0, at_once: true, lead: 0.0 };
    let class = [Class { pages: 1000.0, rate: 1.0, dirty: 1000.0 }];
    let finish = |speed, unsent, link, enough| time_to_finish(&class, unsent, speed, link, enough);
    assert_eq!(finish(1.0, 0.0, link, 1000.0), Some(0.0), "nothing is to be done");
    // 1, 0.632, 0.469 s, after which 374 pages are left.
    let three = finish(1.0, 0.0, link, 400.0).unwrap();
    let (first, second) = (1.0 - (-1.0_f64).exp(), 1.0 - (-(1.0 - (-1.0_f64).exp())).exp());
    assert!(near(three, 1.0 + first + second), "{three}");
    // At half of the speed one round is enough.
    assert_eq!(finish(0.5, 0.0, link, 400.0), Some(1.0));
    // What was never sent goes with the first round, and makes it longer.
    assert_eq!(finish(0.1, 1000.0, link, 400.0), Some(2.0));
    // What becomes dirty until the guest stands still counts as well: 393 · e^−0.1 of it is clean.
    let lead = Link { lead: 0.1, ..link };
    let last = 394.0 + 606.0 * (1.0 - (-0.05_f64).exp());
    assert_eq!(finish(0.5, 0.0, lead, last + 1.0), Some(1.0));
    assert!(finish(0.5, 0.0, lead, last - 3.0).unwrap() > 1.3);
    // Without a link, or where rounds leave as much each time, it does not finish.
    assert_eq!(finish(1.0, 0.0, Link { pages: 0.0, ..link }, 400.0), None);
    assert_eq!(finish(1.0, 0.0, Link { pages: -1.0, ..link }, 2000.0), None);
    let wild = [Class { rate: 100.0, ..class[0] }];
    assert_eq!(time_to_finish(&wild, 0.0, 1.0, link, 400.0), None);
    // A link that would take months is none.
    assert_eq!(finish(0.0, 0.0, Link { pages: 9e-5, ..link }, 400.0), None);
    assert_eq!(
        finish(0.0, 0.0, Link { pages: 1.1e-4, ..link }, 400.0).map(f64::round),
        Some(9_090_909.0)
    );
}

/// Ten segments of 1,000 pages: `hot` of them are dirty all over and written `rate` times a second
/// each, the others have `still` dirty pages and rest.
fn of_ten(hot: usize, rate: f32, still: f32) -> Guest {
    let segment = |index: usize| Segment {
        last: if index < hot { 1000.0 } else { still },
        top: if index < hot { 1000.0 } else { still },
        weight: if index < hot { 1.0 } else { 0.0 },
        // A mean growth that makes the rate, at a mean level of nothing and without a spread.
        g: rate * 1000.0,
        ..Segment::default()
    };
    Guest { segments: (0..10).map(segment).collect(), size: 1000.0, ..Guest::default() }
}

#[test]
fn a_guest_that_hardly_runs_is_spared_what_fits_as_it_is() {
    let link = Link { pages: 10_000.0, idle: 0.0, at_once: false, lead: 0.0 };
    // It stands still: 8,000 pages are dirty, and what may be left is. The cut is in sixteenths.
    let guest = of_ten(0, 0.0, 800.0);
    assert_eq!(guest.spared(0.0, 0.0, link, 8000.0).len(), 10, "nothing has to be sent");
    assert_eq!(guest.spared(0.0, 0.0, link, 7199.0).len(), 8);
    assert_eq!(guest.spared(0.0, 0.0, link, 4000.0).len(), 5);
    assert_eq!(guest.spared(0.0, 0.0, link, 800.0).len(), 1);
    assert!(guest.spared(0.0, 0.0, link, 799.0).is_empty());
    // Those with most dirty pages are sent; clean ones are none of either.
    let mut guest = of_ten(0, 0.0, 0.0);
    guest.segments[7].last = 900.0;
    guest.segments[3].last = 100.0;
    assert_eq!(guest.spared(0.0, 0.0, link, 100.0), [3]);
}

#[test]
fn what_is_dirtied_in_a_shorter_round_counts_for_what_is_spared() {
    let link = Link { pages: 1000.0, idle: 0.0, at_once: false, lead: 0.0 };
    // Five segments of 1,000 pages, 0.1 writes a second each, and five with 100 that rest. Sent are
    // the five, in 5 s: each is left with 1000 · (1 − (1 − e^−0.5) / 0.5) = 213 pages.
    let guest = of_ten(5, 0.1, 100.0);
    let left = 5.0 * 1000.0 * (1.0 - (1.0 - (-0.5_f64).exp()) / 0.5);
    assert_eq!(guest.spared(0.0, 1.0, link, left + 501.0), [5, 6, 7, 8, 9]);
    assert_ne!(guest.spared(0.0, 1.0, link, left + 499.0), [5, 6, 7, 8, 9]);
    // Half as fast, half as often: (1 − e^−0.25) / 0.25.
    let left = 5.0 * 1000.0 * (1.0 - (1.0 - (-0.25_f64).exp()) / 0.25);
    assert_eq!(guest.spared(0.0, 0.5, link, left + 501.0), [5, 6, 7, 8, 9]);
    // What was never sent makes the round longer: 5 s more.
    let left = 5.0 * 1000.0 * (1.0 - (1.0 - (-0.5_f64).exp()) / 0.5);
    assert_eq!(guest.spared(5000.0, 0.5, link, left + 501.0), [5, 6, 7, 8, 9]);
    assert_ne!(guest.spared(5000.0, 0.5, link, left + 499.0), [5, 6, 7, 8, 9]);
}

#[test]
fn what_is_spared_goes_on_to_become_dirty() {
    let link = Link { pages: 1000.0, idle: 0.0, at_once: false, lead: 0.0 };
    // Ten segments with 100 of 1,000 pages dirty. Half of them is sent in `t`, in which pages are
    // written before their turn: 1000 · t = 5 · (1000 − 900 · k(0.1 · t)), k(x) = (1 − e^−x) / x.
    let mut guest = of_ten(10, 0.1, 0.0);
    guest.segments.iter_mut().for_each(|segment| segment.last = 100.0);
    let mut time = 0.5;
    for _ in 0..100 {
        time = 5.0 * (1.0 - 0.9 * kept(0.1 * time));
    }
    let sent = 5.0 * 1000.0 * (1.0 - kept(0.1 * time));
    let spared = 5.0 * (1000.0 - 900.0 * (-0.1 * time).exp());
    assert_eq!(guest.spared(0.0, 1.0, link, sent + spared + 15.0).len(), 5);
    assert!(guest.spared(0.0, 1.0, link, sent + spared - 15.0).len() < 5);
}

#[test]
fn rounds_that_gain_hardly_anything_are_no_way_to_finish() {
    let link = Link { pages: 1000.0, idle: 0.0, at_once: true, lead: 0.0 };
    // Rounds end at 314 pages, and come there ever more slowly: 353, 345, 339, 334.
    let class = [Class { pages: 1000.0, rate: 1.2, dirty: 1000.0 }];
    assert!(time_to_finish(&class, 0.0, 1.0, link, 346.0).is_some());
    assert_eq!(time_to_finish(&class, 0.0, 1.0, link, 335.0), None);
}

#[test]
fn pages_that_never_become_dirty_are_believed_not_to_in_time() {
    let mut guest = seen(&ON_A_LINE);
    assert!(near(line(&guest).0, 1024.0));
    (0..500).for_each(|_| guest.look(&[960], SECOND, 0.0));
    let (pages, _) = line(&guest);
    assert!((960.0..980.0).contains(&pages), "{pages}");
}

#[test]
fn the_most_that_was_dirty_fades_by_a_thousandth_with_each_look() {
    let mut guest = seen(&[0, 512, 768]);
    assert_eq!(guest.segments[0].top, 768.0);
    guest.look(&[100], SECOND, 0.0);
    guest.look(&[150], SECOND, 0.0);
    assert!(near(guest.segments[0].top.into(), 767.232), "{}", guest.segments[0].top);
}

#[test]
fn a_line_needs_a_page_that_was_dirty() {
    let after = |remaining| {
        let mut guest = Guest::default();
        guest.look_at_all(remaining, SECOND, 0.0);
        guest.segments[0].line(4096.0).is_some()
    };
    assert_eq!([after(0), after(1)], [false, true]);
}

#[test]
fn levels_that_are_close_together_make_no_line() {
    let mut segment = Segment { top: 1000.0, ..Segment::default() };
    // Seen at 900 to 1,000 pages it would end at 1,000, if anything followed from that.
    segment.learn(900.0, 100.0, 1.0);
    segment.learn(980.0, 20.0, 1.0);
    assert_eq!(segment.line(4096.0).unwrap().0, 4096.0);
    segment.learn(600.0, 400.0, 1.0);
    assert!(near(segment.line(4096.0).unwrap().0.into(), 1000.0));
}

#[test]
fn of_a_segment_that_is_dirty_all_over_a_fiftieth_counts_as_clean() {
    let mut segment = Segment { top: 1000.0, ..Segment::default() };
    segment.learn(1000.0, 40.0, 1.0);
    assert_eq!(segment.line(1000.0), Some((1000.0, 2.0)));
}

#[test]
fn what_becomes_dirty_until_the_guest_stands_still_counts() {
    let link = Link { pages: 1000.0, idle: 0.0, at_once: true, lead: 0.1 };
    // Nothing is dirty: 1000 · (1 − e^(−0.5 · 2 · 0.1)) = 95.16 will be.
    let class = [Class { pages: 1000.0, rate: 2.0, dirty: 0.0 }];
    assert_eq!(time_to_finish(&class, 0.0, 0.5, link, 95.2), Some(0.0));
    assert_eq!(time_to_finish(&class, 0.0, 0.5, link, 95.1), None);
}
