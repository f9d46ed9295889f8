//! Clocks that are set while a guest moves: no wait goes by them.

use std::time::Duration;

use anyhow::ensure;
use godwit_e2e::{LIMIT, Pair, await_copying, check_moved};
use godwit_stamp::settings::Mode;
use godwit_testbed::{Clock, Godwit, GuestConfig, Link, VmConfig, builds_for};

const DAY: i64 = 24 * 60 * 60;
const SLOW: &[&str] =
    &["--max-bandwidth", "20MiB/s", "--compression", "none", "--reconnect", "60s", "--verify"];

#[test]
fn a_guest_moves_whatever_the_clocks_of_both_sides_say() -> anyhow::Result<()> {
    // Mutation: a deadline, such as that of lost connections, goes by the time of day.
    let test = "a_guest_moves_whatever_the_clocks_of_both_sides_say";
    let Some(build) = builds_for(test).into_iter().next_back() else { return Ok(()) };
    for days in [-20 * 365, 20 * 365] {
        let clocks = [Clock::new()?, Clock::new()?];
        let [here, there] = [0, 1].map(|side: usize| Godwit::built().map(|it| clocks[side].of(it)));
        let (here, there) = (here?, there?);
        let mut pair = Pair::start(&VmConfig::new(&build, GuestConfig::small(Mode::Rate)))?;
        let (receive, address) = there.receive(&pair.destination, &["--reconnect", "60s"])?;
        let link = Link::to(&address)?;
        let migrate = here.migrate(&pair.source, link.address(), SLOW)?;
        await_copying(&migrate)?;
        clocks[0].set(days * DAY)?;
        clocks[1].set(-days * DAY)?;
        std::thread::sleep(Duration::from_secs(1));
        link.cut();
        migrate.wait_for("severed", LIMIT, |line| line["event"] == "severed")?;
        // Back again, while both count how long the connections are away.
        clocks[0].set(-days * DAY)?;
        clocks[1].set(0)?;
        std::thread::sleep(Duration::from_secs(1));
        link.mend();
        let ended = migrate.wait(LIMIT)?;
        ensure!(receive.wait(LIMIT)?.status.success(), "{}", ended.errors);
        check_moved(&mut pair, &ended)?;
        let last = ended.last();
        let total = last["total_ms"].as_f64();
        ensure!(last["resumptions"] == 1 && total > Some(2e3) && total < Some(6e5), "{last}");
    }
    Ok(())
}
