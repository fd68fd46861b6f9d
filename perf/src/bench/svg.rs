//! Plots as SVG text: whiskers around a reference, bars, spans of latency. Pure functions.
//!
//! Colours and fonts come from classes that the page defines, so that a plot is right on light and dark grounds. Every
//! mark has a title with its figures, for who points at it.

use std::fmt::Write;

use super::stats::Summary;

/// Width of the labels at the left.
const LABELS: f64 = 230.0;
/// Width of the area for marks.
const AREA: f64 = 560.0;
/// Room for figures at the right.
const RIGHT: f64 = 90.0;
/// Height of the axis at the bottom.
const AXIS: f64 = 26.0;
/// Room above the first row.
const TOP: f64 = 8.0;

/// Text as it may stand in markup.
#[must_use]
pub fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

/// A number of at most four digits, with k or M.
#[must_use]
pub fn short(value: f64) -> String {
    let (scaled, suffix) = match value.abs() {
        v if v >= 999_500.0 => (value / 1e6, "M"),
        v if v >= 9_995.0 => (value / 1e3, "k"),
        _ => (value, ""),
    };
    let digits = match scaled.abs() {
        v if v >= 99.95 => 0,
        v if v >= 9.995 => 1,
        _ => 2,
    };
    format!("{scaled:.digits$}{suffix}")
}

/// Where values lie on the axis.
#[derive(Debug, Clone, Copy)]
struct Scale {
    low: f64,
    high: f64,
    log: bool,
}

impl Scale {
    fn linear(low: f64, high: f64) -> Self {
        Self { low, high: if high > low { high } else { low + 1.0 }, log: false }
    }

    /// Over positive values.
    fn log(low: f64, high: f64) -> Self {
        let low = low.max(1e-3);
        Self { low, high: high.max(low * 10.0), log: true }
    }

    fn x(&self, value: f64) -> f64 {
        let part = if self.log {
            (value.max(self.low) / self.low).ln() / (self.high / self.low).ln()
        } else {
            (value - self.low) / (self.high - self.low)
        };
        LABELS + part.clamp(0.0, 1.0) * AREA
    }

    /// Round values for the axis.
    fn ticks(&self) -> Vec<f64> {
        if self.log {
            let first = self.low.log10().ceil() as i32;
            return (first..).map(|power| 10_f64.powi(power)).take_while(|v| *v <= self.high * 1.0001).collect();
        }
        let rough = (self.high - self.low) / 5.0;
        let power = 10_f64.powf(rough.log10().floor());
        let step = [1.0, 2.0, 5.0, 10.0].map(|m| m * power).into_iter().find(|s| *s >= rough).unwrap_or(rough);
        let first = (self.low / step).ceil();
        (0..20).map(|i| (first + f64::from(i)) * step).take_while(|v| *v <= self.high * 1.0001).collect()
    }
}

struct Plot {
    out: String,
    height: f64,
}

impl Plot {
    fn new(title: &str, rows: f64, scale: &Scale, unit: &str) -> Self {
        let height = TOP + rows + AXIS;
        let width = LABELS + AREA + RIGHT;
        let mut out = format!(
            "<svg viewBox=\"0 0 {width} {height}\" role=\"img\" aria-label=\"{}\" class=\"plot\">\n",
            escape(title)
        );
        let foot = TOP + rows;
        for tick in scale.ticks() {
            let x = scale.x(tick);
            let _ = writeln!(out, "<line class=\"grid\" x1=\"{x:.1}\" x2=\"{x:.1}\" y1=\"{TOP}\" y2=\"{foot}\"/>");
            let y = foot + 16.0;
            let _ = writeln!(out, "<text class=\"tick\" x=\"{x:.1}\" y=\"{y}\">{}{unit}</text>", short(tick));
        }
        Self { out, height }
    }

    fn label(&mut self, y: f64, text: &str) {
        let x = LABELS - 8.0;
        let _ = writeln!(self.out, "<text class=\"label\" x=\"{x}\" y=\"{:.1}\">{}</text>", y + 4.0, escape(text));
    }

    fn figure(&mut self, x: f64, y: f64, class: &str, text: &str) {
        let _ = writeln!(
            self.out,
            "<text class=\"figure {class}\" x=\"{:.1}\" y=\"{:.1}\">{text}</text>",
            x + 6.0,
            y + 4.0
        );
    }

    fn end(mut self) -> String {
        debug_assert!(self.height > 0.0);
        self.out.push_str("</svg>\n");
        self.out
    }
}

/// A row of [`whiskers`].
#[derive(Debug, Clone)]
pub struct Row {
    pub label: String,
    pub summary: Summary,
    /// Which class its marks have.
    pub class: &'static str,
}

/// Medians as dots with their middle halves, around a reference line.
#[must_use]
pub fn whiskers(title: &str, rows: &[Row], reference: f64) -> String {
    const ROW: f64 = 22.0;
    let low = rows.iter().map(|r| r.summary.q1).fold(reference, f64::min);
    let high = rows.iter().map(|r| r.summary.q3).fold(reference, f64::max);
    let margin = ((high - low) * 0.08).max(0.02);
    let scale = Scale::linear((low - margin).max(0.0), high + margin);
    let mut plot = Plot::new(title, rows.len() as f64 * ROW, &scale, "");
    let (x, foot) = (scale.x(reference), TOP + rows.len() as f64 * ROW);
    let _ = writeln!(plot.out, "<line class=\"reference\" x1=\"{x:.1}\" x2=\"{x:.1}\" y1=\"{TOP}\" y2=\"{foot}\"/>");
    for (index, Row { label, summary, class }) in rows.iter().enumerate() {
        let y = TOP + (index as f64 + 0.5) * ROW;
        let (x1, x2, middle) = (scale.x(summary.q1), scale.x(summary.q3), scale.x(summary.median));
        plot.label(y, label);
        let text = format!("{label}: {:.3} ({:.3} to {:.3})", summary.median, summary.q1, summary.q3);
        let _ = writeln!(plot.out, "<g class=\"{class}\"><title>{}</title>", escape(&text));
        let _ = writeln!(plot.out, "<line class=\"whisker\" x1=\"{x1:.1}\" x2=\"{x2:.1}\" y1=\"{y}\" y2=\"{y}\"/>");
        let _ = writeln!(plot.out, "<circle cx=\"{middle:.1}\" cy=\"{y}\" r=\"4\"/></g>");
        plot.figure(x2.max(middle) + 2.0, y, "", &format!("{:.2}", summary.median));
    }
    plot.end()
}

/// A group of [`bars`] or [`spans`]: a label and, for each series that it has, a class and values.
#[derive(Debug, Clone)]
pub struct Group<T> {
    pub label: String,
    pub series: Vec<(&'static str, T)>,
}

/// Bars from zero, with their middle halves.
#[must_use]
pub fn bars(title: &str, groups: &[Group<Summary>]) -> String {
    const BAR: f64 = 11.0;
    let high = groups.iter().flat_map(|g| &g.series).map(|(_, s)| s.q3.max(s.median)).fold(0.0, f64::max);
    let scale = Scale::linear(0.0, high * 1.02);
    let mut plot = Plot::new(title, rows_height(groups, BAR), &scale, "");
    place(groups, BAR, |y, label, row| match row {
        None => plot.label(y, label),
        Some((class, summary)) => {
            let (x0, x) = (scale.x(0.0), scale.x(summary.median));
            let (x1, x2) = (scale.x(summary.q1), scale.x(summary.q3));
            let text = format!("{label}: {} ({} to {})", short(summary.median), short(summary.q1), short(summary.q3));
            let _ = writeln!(plot.out, "<g class=\"{class}\"><title>{}</title>", escape(&text));
            let (top, width, thick) = (y - BAR / 2.0, x - x0, BAR - 2.0);
            let _ = writeln!(plot.out, "<rect x=\"{x0:.1}\" y=\"{top:.1}\" width=\"{width:.1}\" height=\"{thick}\"/>");
            let _ =
                writeln!(plot.out, "<line class=\"range\" x1=\"{x1:.1}\" x2=\"{x2:.1}\" y1=\"{y}\" y2=\"{y}\"/></g>");
            plot.figure(x.max(x2), y, "small", &short(summary.median));
        }
    });
    plot.end()
}

/// The latencies of a row: median, and what one in a hundred and in a thousand exceeds, in microseconds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Latencies {
    pub p50: f64,
    pub p99: f64,
    pub p99_9: f64,
}

/// Spans from the median to the 99.9th percentile, with a mark at the 99th, on a logarithmic axis.
#[must_use]
pub fn spans(title: &str, groups: &[Group<Latencies>]) -> String {
    const ROW: f64 = 12.0;
    let all = || groups.iter().flat_map(|g| &g.series).map(|(_, l)| l);
    let low = all().map(|l| l.p50).fold(f64::INFINITY, f64::min);
    let high = all().map(|l| l.p99_9).fold(0.0, f64::max);
    let scale = Scale::log(if low.is_finite() { low * 0.8 } else { 1.0 }, high * 1.2);
    let mut plot = Plot::new(title, rows_height(groups, ROW), &scale, "µs");
    place(groups, ROW, |y, label, row| match row {
        None => plot.label(y, label),
        Some((class, l)) => {
            let (x1, x2, x3) = (scale.x(l.p50), scale.x(l.p99), scale.x(l.p99_9));
            let text = format!("{label}: p50 {}, p99 {}, p99.9 {} µs", short(l.p50), short(l.p99), short(l.p99_9));
            let _ = writeln!(plot.out, "<g class=\"{class}\"><title>{}</title>", escape(&text));
            let _ = writeln!(plot.out, "<line class=\"whisker\" x1=\"{x1:.1}\" x2=\"{x3:.1}\" y1=\"{y}\" y2=\"{y}\"/>");
            let _ = writeln!(plot.out, "<circle cx=\"{x1:.1}\" cy=\"{y}\" r=\"4\"/>");
            let (top, foot) = (y - 4.0, y + 4.0);
            for x in [x2, x3] {
                let _ = writeln!(
                    plot.out,
                    "<line class=\"whisker\" x1=\"{x:.1}\" x2=\"{x:.1}\" y1=\"{top:.1}\" y2=\"{foot:.1}\"/>"
                );
            }
            plot.out.push_str("</g>\n");
        }
    });
    plot.end()
}

/// Room between groups.
const GAP: f64 = 8.0;

fn rows_height<T>(groups: &[Group<T>], row: f64) -> f64 {
    groups.iter().map(|g| g.series.len() as f64 * row + GAP).sum()
}

/// Goes through the rows from top to bottom; each group's label is given once, at its middle.
fn place<T: Copy>(groups: &[Group<T>], row: f64, mut draw: impl FnMut(f64, &str, Option<(&'static str, T)>)) {
    let mut top = TOP + GAP / 2.0;
    for group in groups {
        draw(top + group.series.len() as f64 * row / 2.0, &group.label, None);
        for (index, (class, value)) in group.series.iter().enumerate() {
            draw(top + (index as f64 + 0.5) * row, &group.label, Some((class, *value)));
        }
        top += group.series.len() as f64 * row + GAP;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn summary(median: f64) -> Summary {
        Summary { median, q1: median * 0.9, q3: median * 1.1 }
    }

    /// Whether every element is closed and no figure is missing.
    fn is_sound(svg: &str) {
        assert_eq!(svg.matches("<g ").count(), svg.matches("</g>").count());
        assert_eq!(svg.matches("<text").count(), svg.matches("</text>").count());
        assert!(svg.starts_with("<svg") && svg.ends_with("</svg>\n"));
        assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
    }

    #[test]
    fn plots_are_sound_whatever_the_values() {
        for values in [vec![], vec![0.0], vec![1.0], vec![1e-9, 1e9], vec![5.0, 5.0]] {
            let rows: Vec<Row> =
                values.iter().map(|v| Row { label: "<a>".to_owned(), summary: summary(*v), class: "a" }).collect();
            is_sound(&whiskers("t", &rows, 1.0));
            let group =
                |v: &f64| Group { label: "<a>".to_owned(), series: vec![("a", summary(*v)), ("b", summary(*v))] };
            is_sound(&bars("t", &values.iter().map(group).collect::<Vec<_>>()));
            let latencies = |v: &f64| Latencies { p50: *v, p99: v * 2.0, p99_9: v * 3.0 };
            let group = |v: &f64| Group { label: "x".to_owned(), series: vec![("a", latencies(v))] };
            is_sound(&spans("t", &values.iter().map(group).collect::<Vec<_>>()));
        }
    }

    #[test]
    fn marks_are_where_their_values_are() {
        let linear = Scale::linear(0.0, 10.0);
        assert_eq!((linear.x(0.0), linear.x(5.0), linear.x(99.0)), (LABELS, LABELS + AREA / 2.0, LABELS + AREA));
        assert_eq!(linear.ticks(), [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]);
        let log = Scale::log(1.0, 100.0);
        assert!((log.x(10.0) - (LABELS + AREA / 2.0)).abs() < 1e-9);
        assert_eq!(log.ticks(), [1.0, 10.0, 100.0]);
    }

    #[test]
    fn numbers_are_short() {
        for (value, text) in [
            (0.0, "0.00"),
            (1.234, "1.23"),
            (12.34, "12.3"),
            (123.4, "123"),
            (9994.0, "9994"),
            (10_000.0, "10.0k"),
            (421_000.0, "421k"),
            (1_030_000.0, "1.03M"),
        ] {
            assert_eq!(short(value), text);
        }
        assert_eq!(escape("<a & \"b\">"), "&lt;a &amp; &quot;b&quot;&gt;");
    }
}
