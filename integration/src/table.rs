//! Compares measurements of several subjects, checks their goals, and shows them as a table and as JSON.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::Result;
use comfy_table::{Cell, CellAlignment, Color, Table, presets};
use serde::Serialize;

use crate::median;

/// A subject of measurements. Beside kernel TCP, a Unix socket and TCP with the library, these are the bare mechanism,
/// rsocket in front of the same program, and rsocket's own benchmark rstream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Subject {
    Bare,
    Tcp,
    Unix,
    Rsocket,
    Rstream,
    /// The library; all bytes go through rings.
    Rings,
    /// The library; bytes go straight between the programs' memory.
    Direct,
    /// The library; the reader's device reads the bytes.
    Lent,
    Library,
}

impl Subject {
    const ALL: [Self; 9] = [
        Self::Bare,
        Self::Tcp,
        Self::Unix,
        Self::Rsocket,
        Self::Rstream,
        Self::Rings,
        Self::Direct,
        Self::Lent,
        Self::Library,
    ];

    pub(crate) fn title(self) -> &'static str {
        match self {
            Self::Bare => "bare",
            Self::Tcp => "TCP",
            Self::Unix => "Unix",
            Self::Rsocket => "rsocket",
            Self::Rstream => "rstream",
            Self::Rings => "rings",
            Self::Direct => "direct",
            Self::Lent => "lent",
            Self::Library => "rdmasock",
        }
    }
}

/// A goal for the library's median.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Goal {
    /// At least this many times as good as the subject, in this run.
    Times(Subject, f64),
    /// At most this value, in the row's unit.
    AtMost(f64),
    /// At most this much more than the subject, in the row's unit.
    Over(Subject, f64),
}

/// The direction in which values are better.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Better {
    Higher,
    Lower,
}

/// A metric, with its samples.
#[derive(Debug, Clone, Serialize)]
pub struct Row {
    pub name: String,
    pub unit: &'static str,
    pub better: Better,
    pub goals: Vec<Goal>,
    /// The samples of each subject, in the order measured.
    pub samples: BTreeMap<Subject, Vec<f64>>,
    /// Bytes that the server moved over a link and over TCP, all rounds with the library together.
    pub link_bytes: Option<u64>,
    pub tcp_bytes: Option<u64>,
    pub note: String,
}

impl Row {
    /// Makes a row without samples.
    pub fn new(name: &str, unit: &'static str, better: Better, goals: &[Goal]) -> Self {
        Self {
            name: name.to_owned(),
            unit,
            better,
            goals: goals.to_vec(),
            samples: BTreeMap::new(),
            link_bytes: None,
            tcp_bytes: None,
            note: String::new(),
        }
    }

    /// Adds a sample.
    pub fn add(&mut self, subject: Subject, value: f64) {
        self.samples.entry(subject).or_default().push(value);
    }

    /// Adds what the server moved in one round with the library.
    pub fn add_bytes(&mut self, link: u64, tcp: u64) {
        *self.link_bytes.get_or_insert(0) += link;
        *self.tcp_bytes.get_or_insert(0) += tcp;
    }

    /// Returns the median of a subject's samples, or `None` without samples.
    pub fn median(&self, subject: Subject) -> Option<f64> {
        self.samples.get(&subject).map(|samples| median(samples))
    }

    /// Returns how many times as good as kernel TCP `subject` is. Returns `None` if samples are missing or the ratio is
    /// no number.
    pub fn times_tcp_of(&self, subject: Subject) -> Option<f64> {
        self.ratio(self.median(subject)?, self.median(Subject::Tcp)?)
    }

    /// Returns how many times as good as `subject` the library is. Returns `None` if samples are missing or the ratio
    /// is no number.
    pub fn times(&self, subject: Subject) -> Option<f64> {
        self.ratio(self.median(Subject::Library)?, self.median(subject)?)
    }

    /// Returns the same ratio for each round in which both subjects have samples.
    pub fn times_by_round(&self, subject: Subject) -> Vec<f64> {
        let samples = |subject| self.samples.get(&subject).into_iter().flatten();
        samples(Subject::Library)
            .zip(samples(subject))
            .filter_map(|(ours, theirs)| self.ratio(*ours, *theirs))
            .collect()
    }

    fn ratio(&self, ours: f64, theirs: f64) -> Option<f64> {
        let times = match self.better {
            Better::Higher => ours / theirs,
            Better::Lower => theirs / ours,
        };
        times.is_finite().then_some(times)
    }

    /// Returns whether a goal is met, or `None` if a figure is missing.
    pub fn is_met(&self, goal: Goal) -> Option<bool> {
        let ours = self.median(Subject::Library)?;
        Some(match goal {
            Goal::Times(subject, factor) => self.times(subject)? >= factor,
            Goal::AtMost(limit) => ours <= limit,
            Goal::Over(subject, limit) => ours - self.median(subject)? <= limit,
        })
    }

    fn goal_text(&self, goal: Goal) -> String {
        match goal {
            Goal::Times(Subject::Bare, factor) => format!("≤ {:.0} × bare", 1.0 / factor),
            Goal::Times(subject, factor) => format!("≥ {factor} × {}", subject.title()),
            Goal::AtMost(limit) => format!("≤ {}", figure(limit)),
            Goal::Over(subject, limit) => format!("≤ {} + {limit}", subject.title()),
        }
    }
}

/// The results of a whole run.
#[derive(Debug, Clone, Serialize)]
pub struct Report {
    pub title: String,
    pub cpus: usize,
    pub kernel: String,
    pub rounds: u32,
    pub rows: Vec<SummedRow>,
}

/// A row, with the values that follow from its samples.
#[derive(Debug, Clone, Serialize)]
pub struct SummedRow {
    #[serde(flatten)]
    pub row: Row,
    pub medians: BTreeMap<Subject, f64>,
    pub times_tcp: Option<f64>,
    pub times_rsocket: Option<f64>,
    pub met: Option<bool>,
}

impl Report {
    /// Makes a report, and computes the values of each row.
    pub fn new(title: &str, rounds: u32, rows: Vec<Row>) -> Self {
        let rows = rows
            .into_iter()
            .map(|row| SummedRow {
                medians: row.samples.iter().map(|(k, v)| (*k, median(v))).collect(),
                times_tcp: row.times(Subject::Tcp),
                times_rsocket: row.times(Subject::Rsocket),
                met: row
                    .goals
                    .iter()
                    .map(|goal| row.is_met(*goal))
                    .collect::<Option<Vec<_>>>()
                    .filter(|met| !met.is_empty())
                    .map(|met| met.iter().all(|met| *met)),
                row,
            })
            .collect();
        let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
        Self {
            title: title.to_owned(),
            cpus: std::thread::available_parallelism().map_or(0, usize::from),
            kernel: release.trim().to_owned(),
            rounds,
            rows,
        }
    }

    /// Returns a line for each row that misses its goals. The line says how many times as good as `subject` the library
    /// is, and was in its worst and best round. One round says little if these two are far apart.
    pub fn losing(&self, subject: Subject) -> String {
        let losing: Vec<_> = self.rows.iter().filter(|r| r.met == Some(false)).collect();
        let measured = self.rows.iter().filter(|r| r.met.is_some()).count();
        let mut text = format!("{} of {measured} rows miss their goals\n", losing.len());
        for SummedRow { row, .. } in losing {
            let times = row.times(subject).unwrap_or(0.0);
            let rounds = row.times_by_round(subject);
            let worst = rounds.iter().copied().fold(f64::INFINITY, f64::min);
            let best = rounds.iter().copied().fold(0.0, f64::max);
            text += &format!(
                "  {}: {times:.2} × {} ({worst:.2} to {best:.2})\n",
                row.name,
                subject.title()
            );
        }
        text
    }

    /// Writes the report as JSON.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn write(&self, path: &Path) -> Result<()> {
        Ok(std::fs::write(path, serde_json::to_string_pretty(self)? + "\n")?)
    }
}

impl std::fmt::Display for Report {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let used = |subject| self.rows.iter().any(|row| row.medians.contains_key(&subject));
        let subjects: Vec<Subject> = Subject::ALL.into_iter().filter(|s| used(*s)).collect();
        let bytes = self.rows.iter().any(|row| row.row.link_bytes.is_some());
        let notes = self.rows.iter().any(|row| !row.row.note.is_empty());

        let mut header = vec!["", "unit"];
        header.extend(subjects.iter().map(|subject| subject.title()));
        let rsocket = used(Subject::Rsocket);
        header.push("× TCP");
        header.extend(rsocket.then_some("× rsocket"));
        header.extend(["goal", "met"]);
        header.extend(bytes.then_some("over the link"));
        header.extend(notes.then_some("note"));
        let mut table = Table::new();
        table.load_preset(presets::UTF8_FULL_CONDENSED).set_header(header);
        for SummedRow {
            row,
            medians,
            times_tcp,
            times_rsocket,
            met,
        } in &self.rows
        {
            let mut cells = vec![Cell::new(&row.name), Cell::new(row.unit)];
            cells.extend(subjects.iter().map(|s| number(medians.get(s).map(|v| figure(*v)))));
            cells.push(number(times_tcp.map(|ratio| format!("{ratio:.2}"))));
            if rsocket {
                cells.push(number(times_rsocket.map(|ratio| format!("{ratio:.2}"))));
            }
            let goals: Vec<String> = row.goals.iter().map(|goal| row.goal_text(*goal)).collect();
            cells.push(Cell::new(goals.join(", ")));
            cells.push(match met {
                Some(true) => Cell::new("yes").fg(Color::Green),
                Some(false) => Cell::new("NO").fg(Color::Red),
                None => Cell::new(""),
            });
            if bytes {
                cells.push(number(row.link_bytes.map(|link| {
                    let all = link + row.tcp_bytes.unwrap_or(0);
                    let share = 100.0 * link as f64 / all.max(1) as f64;
                    format!("{} ({share:.1} %)", size(link))
                })));
            }
            cells.extend(notes.then(|| Cell::new(&row.note)));
            table.add_row(cells);
        }
        writeln!(
            f,
            "{}: {} CPUs, Linux {}, medians of {} rounds, alternating",
            self.title, self.cpus, self.kernel, self.rounds
        )?;
        write!(f, "{table}")
    }
}

fn number(text: Option<String>) -> Cell {
    Cell::new(text.unwrap_or_else(|| "–".to_owned())).set_alignment(CellAlignment::Right)
}

/// Returns a value with three significant digits; large values have a suffix for their power of 1,000.
fn figure(value: f64) -> String {
    match value.abs() {
        v if v >= 1e9 => format!("{:.2} G", value / 1e9),
        v if v >= 1e6 => format!("{:.2} M", value / 1e6),
        v if v >= 1e4 => format!("{:.1} k", value / 1e3),
        v if v >= 100.0 => format!("{value:.0}"),
        v if v >= 10.0 => format!("{value:.1}"),
        0.0 => "0".to_owned(),
        _ => format!("{value:.2}"),
    }
}

/// Returns a number of bytes with a decimal suffix.
fn size(bytes: u64) -> String {
    match bytes {
        0..10_000 => format!("{bytes} B"),
        10_000..10_000_000 => format!("{:.1} kB", bytes as f64 / 1e3),
        10_000_000..10_000_000_000 => format!("{:.1} MB", bytes as f64 / 1e6),
        _ => format!("{:.1} GB", bytes as f64 / 1e9),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn goals_look_at_the_better_way() {
        let mut row = Row::new("rtt", "µs", Better::Lower, &[]);
        row.add(Subject::Tcp, 50.0);
        row.add(Subject::Bare, 0.2);
        assert_eq!(row.is_met(Goal::Times(Subject::Tcp, 50.0)), None);
        row.add(Subject::Library, 0.5);
        assert_eq!(row.times(Subject::Tcp), Some(100.0));
        assert_eq!(row.is_met(Goal::Times(Subject::Tcp, 50.0)), Some(true));
        assert_eq!(row.is_met(Goal::Times(Subject::Bare, 0.25)), Some(true));
        assert_eq!(row.is_met(Goal::AtMost(0.4)), Some(false));
        assert_eq!(row.is_met(Goal::Over(Subject::Bare, 0.3)), Some(true));
    }

    #[test]
    fn rows_that_miss_their_goals_are_named_with_their_rounds() {
        let goal = [Goal::Times(Subject::Tcp, 0.97)];
        let row = |name, ours: [f64; 3]| {
            let mut row = Row::new(name, "1/s", Better::Higher, &goal);
            for value in ours {
                row.add(Subject::Tcp, 100.0);
                row.add(Subject::Library, value);
            }
            row
        };
        let rows = vec![
            row("slow", [70.0, 120.0, 90.0]),
            row("fast", [150.0, 90.0, 97.0]),
            Row::new("not measured", "1/s", Better::Higher, &goal),
        ];
        assert_eq!(
            Report::new("", 3, rows).losing(Subject::Tcp),
            "1 of 2 rows miss their goals\n  slow: 0.90 × TCP (0.70 to 1.20)\n"
        );
    }

    #[test]
    fn figures_are_short() {
        assert_eq!(figure(0.0), "0");
        assert_eq!(figure(1.234), "1.23");
        assert_eq!(figure(66_234.0), "66.2 k");
        assert_eq!(size(12_300_000), "12.3 MB");
    }
}
