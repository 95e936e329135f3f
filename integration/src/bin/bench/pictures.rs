//! Draws pictures of results as SVG: one figure over the varied value, with a line for each way. Text uses the viewer's
//! own font, so no font of this machine has a part in it.

use std::path::Path;

use anyhow::{Result, anyhow};
use plotters::prelude::*;

use crate::results::{Figure, Results, Series, Way};

const SIZE: (u32, u32) = (800, 420);

/// A picture of a series.
pub struct Picture {
    pub series: Series,
    figure: Figure,
}

/// Returns the pictures of the figures that a run has.
pub fn of(results: &Results) -> Vec<Picture> {
    let all = Series::RECEIVERS
        .into_iter()
        .flat_map(|series| [(series, Figure::Throughput), (series, Figure::Processor)])
        .chain(Series::CROWDS.map(|series| (series, Figure::Messages)));
    let has = |(series, figure): &(Series, Figure)| {
        let points = &results.points;
        points
            .iter()
            .any(|p| p.series == *series && p.samples.contains_key(figure))
    };
    all.filter(has)
        .map(|(series, figure)| Picture { series, figure })
        .collect()
}

impl Picture {
    /// Returns the title of the picture.
    pub fn title(&self) -> String {
        format!("{}: {}", self.series.title(), self.figure.title())
    }

    /// Returns the name of the picture's file.
    pub fn file(&self) -> String {
        let figure = match self.figure {
            Figure::Processor => "processor",
            Figure::Messages => "messages",
            _ => "throughput",
        };
        format!("{figure}-{}.svg", self.series.word())
    }

    /// Draws the picture into a file in `dir`.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn draw(&self, results: &Results, dir: &Path) -> Result<()> {
        let path = dir.join(self.file());
        let lines: Vec<(Way, Vec<(f64, f64)>)> = results
            .ways(self.series)
            .into_iter()
            .map(|way| (way, self.line(results, way)))
            .collect();
        // The backend's errors cannot be sent to other threads, so they become text.
        let failed = |error: &dyn std::fmt::Display| anyhow!("draw {}: {error}", path.display());
        draw(&path, &self.title(), self.series, &lines).map_err(|error| failed(&error))
    }

    fn line(&self, results: &Results, way: Way) -> Vec<(f64, f64)> {
        let point = |x: u64| {
            let y = results.median(self.series, x, way, self.figure)?;
            Some((x as f64, y))
        };
        results.values(self.series).into_iter().filter_map(point).collect()
    }
}

fn colour(way: Way) -> RGBColor {
    match way {
        Way::Tcp => RGBColor(90, 90, 90),
        Way::Unix => RGBColor(214, 137, 16),
        Way::Shm => RGBColor(31, 97, 200),
        Way::Device => RGBColor(170, 50, 120),
        Way::DeviceDirect => RGBColor(40, 140, 70),
        Way::DeviceLent => RGBColor(120, 80, 160),
        Way::DeviceDynamic => RGBColor(20, 20, 20),
        Way::BareOwn => RGBColor(90, 90, 90),
        Way::BareOne => RGBColor(214, 137, 16),
        Way::Link => RGBColor(31, 97, 200),
    }
}

/// Draws a picture into the file at `path`. Both axes are logarithmic, as sizes and figures span decades.
fn draw(
    path: &Path,
    title: &str,
    series: Series,
    lines: &[(Way, Vec<(f64, f64)>)],
) -> Result<(), Box<dyn std::error::Error>> {
    let points = || lines.iter().flat_map(|(_, line)| line);
    let (mut x, mut y) = ((f64::MAX, f64::MIN), (f64::MAX, f64::MIN));
    for point in points() {
        x = (x.0.min(point.0), x.1.max(point.0));
        y = (y.0.min(point.1), y.1.max(point.1));
    }
    let root = SVGBackend::new(path, SIZE).into_drawing_area();
    root.fill(&WHITE)?;
    let mut chart = ChartBuilder::on(&root)
        .margin(12)
        .caption(title, ("sans-serif", 17))
        .x_label_area_size(36)
        .y_label_area_size(64)
        .build_cartesian_2d(
            (x.0 / 1.3..x.1 * 1.3).log_scale().base(series.base()),
            (y.0 / 1.5..y.1 * 1.5).log_scale(),
        )?;
    chart
        .configure_mesh()
        .max_light_lines(1)
        .x_desc(series.varied())
        .x_label_formatter(&|x| series.value(x.round() as u64))
        .y_label_formatter(&|y| format!("{y}"))
        .label_style(("sans-serif", 13))
        .draw()?;
    for (way, line) in lines {
        let colour = colour(*way);
        chart
            .draw_series(LineSeries::new(line.iter().copied(), colour.stroke_width(2)))?
            .label(way.title())
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], colour.stroke_width(2)));
        chart.draw_series(line.iter().map(|point| Circle::new(*point, 3, colour.filled())))?;
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperLeft)
        .background_style(WHITE.mix(0.8))
        .border_style(RGBColor(200, 200, 200))
        .label_font(("sans-serif", 13))
        .draw()?;
    Ok(root.present()?)
}
