//! Draws a report as an SVG: for each row, how many times as good as kernel TCP the other subjects are. Text uses the
//! viewer's own font.

use std::path::Path;

use anyhow::{Result, anyhow};
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use crate::table::{Report, Subject};

/// Measures of the picture, in pixels.
const WIDTH: u32 = 760;
const NAMES: i32 = 250;
const TOP: i32 = 44;
const BAR: i32 = 15;
const GAP: i32 = 12;
const MARGIN: i32 = 12;

/// Draws the report into the file at `path`.
///
/// # Errors
/// If the file cannot be written.
pub fn draw(report: &Report, path: &Path) -> Result<()> {
    // The backend's errors cannot be sent to other threads, so they become text.
    bars(report, path).map_err(|error| anyhow!("draw {}: {error}", path.display()))
}

fn colour(subject: Subject) -> RGBColor {
    match subject {
        Subject::Tcp => RGBColor(140, 140, 140),
        Subject::Unix => RGBColor(214, 137, 16),
        _ => RGBColor(31, 97, 200),
    }
}

fn bars(report: &Report, path: &Path) -> Result<(), Box<dyn std::error::Error>> {
    let subjects = |row: &crate::table::SummedRow| {
        let of = [Subject::Tcp, Subject::Unix, Subject::Library];
        let times = of.map(|subject| Some((subject, row.row.times_tcp_of(subject)?)));
        times.into_iter().flatten().collect::<Vec<_>>()
    };
    let rows: Vec<_> = report.rows.iter().map(|row| (&row.row.name, subjects(row))).collect();
    let most = rows
        .iter()
        .flat_map(|(_, times)| times)
        .fold(1.0, |most, (_, times)| f64::max(most, *times));
    let number = rows.iter().map(|(_, times)| times.len() as i32).sum::<i32>();
    let height = TOP + number * BAR + rows.len() as i32 * GAP + 2 * MARGIN + 18;

    let root = SVGBackend::new(path, (WIDTH, height.unsigned_abs())).into_drawing_area();
    root.fill(&WHITE)?;
    let grey = RGBColor(90, 90, 90);
    let text = |size: i32, colour: RGBColor| ("sans-serif", size).into_font().color(&colour);
    let right = Pos::new(HPos::Right, VPos::Center);
    let left = Pos::new(HPos::Left, VPos::Center);
    root.draw(&Text::new(
        "Times as good as kernel TCP",
        (MARGIN, MARGIN),
        text(16, BLACK),
    ))?;
    let room = f64::from(WIDTH as i32 - NAMES - 90);
    let mut y = TOP;
    for (name, times) in &rows {
        let middle = y + times.len() as i32 * BAR / 2;
        root.draw(&Text::new(
            name.as_str(),
            (NAMES - 8, middle),
            text(13, BLACK).pos(right),
        ))?;
        for (subject, times) in times {
            let end = NAMES + (times / most * room).round() as i32;
            root.draw(&Rectangle::new(
                [(NAMES, y + 1), (end.max(NAMES + 1), y + BAR - 1)],
                colour(*subject).filled(),
            ))?;
            let label = format!("{} {times:.2}", subject.title());
            root.draw(&Text::new(label, (end + 5, y + BAR / 2), text(11, grey).pos(left)))?;
            y += BAR;
        }
        y += GAP;
    }
    let source = format!(
        "scripts/demo --svg: medians of {} rounds, {} CPUs, Linux {}",
        report.rounds,
        report.cpus,
        report.kernel.split('-').next().unwrap_or_default()
    );
    root.draw(&Text::new(source, (MARGIN, height - MARGIN - 12), text(11, grey)))?;
    Ok(root.present()?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::table::{Better, Row};

    #[test]
    fn each_row_has_its_subjects_and_the_source_is_named() {
        let mut row = Row::new("redis GET", "requests/s", Better::Higher, &[]);
        for (subject, value) in [(Subject::Tcp, 50.0), (Subject::Unix, 100.0), (Subject::Library, 400.0)] {
            row.add(subject, value);
        }
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("demo.svg");
        draw(&Report::new("a title", 3, vec![row]), &path).unwrap();
        let text = std::fs::read_to_string(path).unwrap();
        for words in [
            "redis GET",
            "TCP 1.00",
            "Unix 2.00",
            "rdmasock 8.00",
            "medians of 3 rounds",
        ] {
            assert!(text.contains(words), "{words} in {text}");
        }
    }
}
