//! Hands by commands that hang, end, say nonsense or answer late.

use std::path::Path;

use super::*;
use crate::moves::Moves;
use crate::runner::tests::plan;

/// What a host answers to who it is.
const EAST: &str = r#"echo '{"Home":{"host":"east","directory":"/x"}}'"#;

/// A shell in the place of ssh.
fn shell(script: &str) -> Vec<String> {
    ["sh", "-c", script, "godwit"].map(str::to_owned).into()
}

fn hands(script: &str) -> Result<RemoteHands, String> {
    RemoteHands::reach(&shell(script), "x", Files::New)
}

fn attempt() -> Attempt {
    Attempt { vm: 0, to: 0, number: 1 }
}

fn rate() -> Rate {
    Rate::from_bytes_per_second(1e6)
}

/// Looks until there is something to see.
fn seen(hands: &mut RemoteHands) -> Look {
    let until = Instant::now() + Duration::from_secs(10);
    loop {
        match hands.look(&plan(), &attempt()) {
            Look::Moving if Instant::now() < until => {
                std::thread::sleep(Duration::from_millis(10));
            }
            look => return look,
        }
    }
}

#[test]
fn a_command_that_hangs_holds_nobody_up_and_what_may_have_begun_is_under_way() {
    // Mutations: an answer is waited for as long as it may take; it counts as there meanwhile.
    let mut hands = hands(&format!("read -r open; {EAST}; exec sleep 600")).unwrap();
    assert!(hands.are_there() && hands.trouble().is_none());
    let began = Instant::now();
    assert_eq!(hands.begin(&plan(), &attempt(), rate()), Ok(()));
    assert_eq!(hands.look(&plan(), &attempt()), Look::Moving);
    assert!(!hands.pace(&plan(), &attempt(), rate()));
    hands.cancel(&plan(), &attempt());
    assert!(!hands.are_there());
    assert!(began.elapsed() < 2 * PATIENCE, "{:?}", began.elapsed());
    assert_eq!(hands.trouble(), None, "not yet");
    std::thread::sleep((began + SILENCE + PATIENCE).saturating_duration_since(Instant::now()));
    assert_eq!(hands.trouble().as_deref(), Some(SILENT));
    let ends = Instant::now();
    drop(hands);
    assert!(ends.elapsed() < PATIENCE, "{:?}", ends.elapsed());
}

#[test]
fn what_is_answered_late_is_the_answer_to_what_was_asked() {
    // Mutation: an answer that nobody waits for any more is thrown away.
    let late = |answer: &str| {
        format!(
            "read -r open; {EAST}; read -r plan; echo '\"Done\"'; read -r ask; sleep 1.2; \
             echo '{answer}'; while read -r more; do echo '{{\"Seen\":\"Moving\"}}'; done"
        )
    };
    let mut refused = hands(&late(r#"{"No":"no room"}"#)).unwrap();
    assert_eq!(refused.begin(&plan(), &attempt(), rate()), Ok(()), "it may have begun");
    assert_eq!(seen(&mut refused), Look::Failed("no room".to_owned()));
    let mut looked = hands(&late(r#"{"Seen":"NeverBegan"}"#)).unwrap();
    assert_eq!(looked.look(&plan(), &attempt()), Look::Moving);
    assert_eq!(seen(&mut looked), Look::NeverBegan);
    assert!(looked.are_there() && looked.trouble().is_none());
}

#[test]
fn one_that_ends_is_told_in_its_own_words_and_reached_again() {
    let runs = std::env::temp_dir().join(format!("godwit-reach-{}", std::process::id()));
    let runs = runs.display();
    let script = format!(
        "echo run >> {runs}; \
         if [ $(wc -l < {runs}) = 2 ]; then echo 'no route' >&2; exit 255; fi; \
         read -r open; {EAST}; read -r plan; echo '\"Done\"'; read -r ask; \
         if [ $(wc -l < {runs}) = 1 ]; then echo 'godwit: the link broke' >&2; exit 255; fi; \
         echo '{{\"Seen\":\"Moved\"}}'; read -r more"
    );
    let mut hands = hands(&script).unwrap();
    assert_eq!(hands.look(&plan(), &attempt()), Look::Moving);
    assert_eq!(hands.trouble().as_deref(), Some("the link broke"));
    assert!(!hands.are_there());
    std::thread::sleep(AGAIN);
    assert_eq!(hands.look(&plan(), &attempt()), Look::Moving);
    assert_eq!(hands.trouble().as_deref(), Some("no route"));
    assert_eq!(seen(&mut hands), Look::Moved);
    assert!(hands.are_there() && hands.trouble().is_none());
    std::fs::remove_file(runs.to_string()).unwrap();
}

#[test]
fn one_that_says_nonsense_or_nothing_or_is_another_host_is_told_in_one_line() {
    let told = |script: &str| hands(script).unwrap_err();
    let words = "'Welcome to east' is no answer: is that godwit of this release?";
    assert_eq!(told("echo Welcome to east; exec sleep 600"), words);
    let long = told("head -c 100000 /dev/zero | tr '\\0' x; echo; exec sleep 600");
    assert!(long.len() < 200 && long.contains("is no answer"), "{long}");
    assert_eq!(told("exit 1"), SILENT);
    // What it leaves behind has its output, and is not waited for.
    let began = Instant::now();
    assert_eq!(told("sleep 20 & echo 'not today' >&2; exit 1"), "not today");
    assert!(began.elapsed() < Duration::from_secs(10), "{:?}", began.elapsed());
    let home = Home { host: "west".to_owned(), directory: "/x".into() };
    let other = RemoteHands::reach(&shell(EAST), "x", Files::Known(&home)).unwrap_err();
    let words = "that is the host east, and the plan is of west: name the command that runs \
                 godwit there";
    assert_eq!(other, words);
}

#[test]
fn what_carries_the_questions_does_not_end_with_who_asks() {
    // Mutation: it is in the group that a terminal's Ctrl-C goes to.
    let script = r#"read -r open; set -- $(cat /proc/$$/stat)
        echo "{\"Home\":{\"host\":\"$5\",\"directory\":\"/x\"}}"; read -r more"#;
    let hands = hands(script).unwrap();
    let group = std::fs::read_to_string("/proc/self/stat").unwrap();
    let group = group.rsplit(')').next().unwrap().split_whitespace().nth(2).unwrap().to_owned();
    assert_ne!(hands.home().unwrap().host, group);
}

#[test]
fn a_plan_that_the_host_does_not_understand_is_trouble_and_no_move() {
    // Mutation: the refusal is heard as an answer, and what is looked at is under way for ever.
    let script = format!(
        "read -r open; {EAST}; while read -r ask; do echo '{{\"No\":\"of another release\"}}'; done"
    );
    let mut hands = hands(&script).unwrap();
    assert_eq!(hands.look(&plan(), &attempt()), Look::Moving);
    assert_eq!(hands.trouble().as_deref(), Some("of another release"));
    assert!(!hands.are_there());
}

/// A host without any move.
struct Idle;

impl Host for Idle {
    fn open(&mut self, name: &str, _: Option<&Path>) -> Result<(Home, Moves), String> {
        Err(format!("an evacuation named '{name}' runs on this host"))
    }

    fn vms(&mut self, _: &str, only: &[String], _: &[String]) -> Result<Vec<ListedVm>, String> {
        let vm = |name: &String| ListedVm { name: Some(name.clone()), ..ListedVm::default() };
        Ok(only.iter().map(vm).collect())
    }
}

#[test]
fn a_host_tells_its_vms_before_anything_is_opened_and_refuses_what_it_does_not_know() {
    let ask = |line: &str| {
        let mut output = Vec::new();
        serve_hands(line.as_bytes(), &mut output, &mut Idle).unwrap();
        serde_json::from_slice::<Answer>(&output).unwrap()
    };
    let only = vec!["web01".to_owned()];
    let vms = Ask::Vms { manager: "libvirt".to_owned(), only, except: Vec::new() };
    let Answer::Vms(vms) = ask(&serde_json::to_string(&vms).unwrap()) else { panic!("no VMs") };
    assert_eq!(vms[0].name.as_deref(), Some("web01"));
    let no = |line: &str| match ask(line) {
        Answer::No(why) => why,
        other => panic!("{other:?}"),
    };
    assert!(no(r#"{"Open":["x",null]}"#).contains("named 'x' runs"));
    assert!(no(r#""Clear""#).contains("not said what of"));
    assert!(no("hello").contains("is it of this release?"));
}
