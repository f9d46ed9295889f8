//! `make nats`: a NATS server for the tests of several coordinators, unpacked into target/nats and
//! not installed.

use crate::apt::Apt;

const PACKAGE: &str = "nats-server";

/// Unpacks it where that is possible; where it is not, tests that need it say so.
pub(crate) fn provide() -> anyhow::Result<()> {
    let work = crate::target_dir().join("nats");
    match Apt::default().unpacked(&[PACKAGE], &work) {
        Ok(root) => println!("{} is there", root.join("usr/sbin/nats-server").display()),
        Err(problem) => println!("{PACKAGE} is not available here: {problem:#}"),
    }
    Ok(())
}
