//! What is to be reached, and whether it was: godwit beside the best of QEMU's ways, cell by cell
//! and figure by figure.

use godwit_bench::report::{Better, Report};

use crate::cells::Cell;
use crate::contestants::Contestant;
use crate::rows::{Figure, Moves, Row, ratio};

/// So much is taken for equal.
const EQUAL: f64 = 1.05;
/// And so much of work, in seconds.
const EQUAL_WORK: f64 = 0.1;

const COMPARED: [(&str, Figure); 3] =
    [("total time", Figure::Total), ("downtime", Figure::Downtime), ("CPU", Figure::Cpu)];
/// Beyond loopback, there is a link to be spared.
const ON_WIRE: (&str, Figure) = ("bytes on the wire", Figure::Wire);

/// The way of QEMU's that is best by `figure` among `ways`, and its median.
pub(crate) fn best(
    rows: &[Row],
    cell: &Cell,
    figure: Figure,
    with_post_copy: bool,
) -> Option<(Contestant, f64)> {
    let ways = cell.contestants.iter().filter(|who| who.style().is_some());
    let ways = ways.filter(|who| with_post_copy || !who.is_post_copy());
    let medians = ways.map(|&who| {
        let moves = Moves::of(rows, &cell.name(), who.name());
        (who, moves.median(figure))
    });
    medians.filter(|(_, median)| !median.is_nan()).min_by(|a, b| a.1.total_cmp(&b.1))
}

/// Enters the targets of a cell into `report`.
pub(crate) fn enter(cell: &Cell, rows: &[Row], report: &mut Report) {
    let name = cell.name();
    let godwit = Moves::of(rows, &name, Contestant::Godwit.name());
    if godwit.count() == 0 {
        return;
    }
    let unfinished = (godwit.count() - godwit.finished()) as f64;
    report.target(
        format!("{name}: godwit's moves that did not finish"),
        unfinished,
        0.0,
        Better::Lower,
    );
    let wire = cell.link.is_slow().then_some(ON_WIRE);
    for (what, figure) in COMPARED.into_iter().chain(wire) {
        let Some((who, best)) = best(rows, cell, figure, true) else { continue };
        let value = ratio(godwit.median(figure), best);
        let each = godwit.beside(&Moves::of(rows, &name, who.name()), figure, ratio);
        let target = format!("{name}: godwit / {}: {what}", who.name());
        report.target_of_rounds(target, (value, &each), EQUAL, Better::Lower);
    }
    let [later, other] = [Contestant::GodwitPostCopy, Contestant::PostCopy]
        .map(|who| Moves::of(rows, &name, who.name()));
    if other.count() == 0 {
        return;
    }
    if cell.guest.is_at_full_speed() {
        lost(
            format!("{name}: godwit's work lost, beyond QEMU's post-copy, s"),
            &godwit,
            &other,
            report,
        );
    }
    if later.count() == 0 {
        return;
    }
    for (what, figure) in [("total time", Figure::Total), ("downtime", Figure::Downtime)] {
        let value = ratio(later.median(figure), other.median(figure));
        let each = later.beside(&other, figure, ratio);
        let target = format!("{name}: post-copy, godwit / QEMU: {what}");
        report.target_of_rounds(target, (value, &each), EQUAL, Better::Lower);
    }
    lost(format!("{name}: post-copy, godwit's work lost beyond QEMU's, s"), &later, &other, report);
}

/// Work lost is compared by its difference: of what is next to nothing a ratio says nothing.
fn lost(target: String, own: &Moves<'_>, other: &Moves<'_>, report: &mut Report) {
    let beyond = |own: f64, other: f64| own - other;
    let value = beyond(own.median(Figure::Lost), other.median(Figure::Lost));
    let each = own.beside(other, Figure::Lost, beyond);
    report.target_of_rounds(target, (value, &each), EQUAL_WORK, Better::Lower);
}
