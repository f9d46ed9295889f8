//! `godwit report` of what is no migration: simulations, and what benchmarks and soaks write.

use anyhow::{Context, ensure};
use godwit_testbed::{Godwit, Room};
use serde_json::json;

/// What `godwit WORDS` prints.
fn printed(words: &[&str]) -> anyhow::Result<String> {
    Ok(String::from_utf8(Godwit::built()?.done(words)?.stdout)?)
}

/// The page of a file with this text.
fn page_of(room: &Room, name: &str, text: &str) -> anyhow::Result<String> {
    let path = room.dir().join(name);
    std::fs::write(&path, text)?;
    let page = printed(&["report", path.to_str().context("a path")?, "--out", "-"])?;
    ensure!(page.len() < 500 << 10, "{} bytes", page.len());
    for unwanted in ["http", "<script", "url(", "NaN"] {
        ensure!(!page.contains(unwanted), "{unwanted} is in {page}");
    }
    Ok(page)
}

#[test]
fn simulations_have_a_page() -> anyhow::Result<()> {
    let room = Room::new()?;
    let cases = printed(&["simulate", "--scenario", "busy", "--sweep", "throttle", "--json"])?;
    let page = page_of(&room, "busy.jsonl", &cases)?;
    let count = cases.lines().count();
    ensure!(count > 2 && page.contains(&format!("busy: {count} simulated migrations")), "{page}");
    for wanted in ["<h2>adaptive</h2>", "the guest&#39;s speed", "<td>gave-up"] {
        ensure!(page.contains(wanted), "{wanted}: {page}");
    }
    let words = ["simulate", "evacuate", "--hosts", "20", "--vms", "100", "--json"];
    let page = page_of(&room, "fleet.json", &printed(&words)?)?;
    ensure!(page.contains("A simulated evacuation") && page.contains("hosts emptied"), "{page}");
    Ok(())
}

#[test]
fn a_soak_has_a_page_and_other_json_is_refused() -> anyhow::Result<()> {
    let room = Room::new()?;
    let row = |ms: f64| json!({ "vm": "tcg-memfd", "verdict": "moved", "downtime_ms": ms });
    let soak = json!({
        "name": "soak", "machine": "2 cores", "seed": 9, "seconds": 128.7,
        "rows": [row(73.1), row(21.0), row(40.2)],
        "targets": [{ "name": "BUGs", "value": 0.0, "limit": 0.0, "better": "lower",
                      "met": true, "within_noise": false }],
    });
    let page = page_of(&room, "soak.json", &serde_json::to_string_pretty(&soak)?)?;
    for wanted in ["soak: 1 of 1 targets met", "<td>tcg-memfd", "73.1ms most"] {
        ensure!(page.contains(wanted), "{wanted}: {page}");
    }

    let other = room.dir().join("other.json");
    std::fs::write(&other, "{\n  \"measured\": 1\n}\n")?;
    let other = other.to_str().context("a path")?;
    let refused = Godwit::built()?.run(&["report", other, "--out", "-"])?;
    let said = String::from_utf8_lossy(&refused.stderr);
    ensure!(refused.status.code() == Some(1), "{said}");
    ensure!(said.contains("is JSON, but nothing that has a page") && said.lines().count() == 1);
    // Spans are of migrations.
    let soak = room.dir().join("soak.json");
    let soak = soak.to_str().context("a path")?;
    let refused = Godwit::built()?.run(&["report", soak, "--otlp", "http://127.0.0.1:1"])?;
    let said = String::from_utf8_lossy(&refused.stderr);
    ensure!(refused.status.code() == Some(1) && said.contains("is no migration"), "{said}");
    Ok(())
}
