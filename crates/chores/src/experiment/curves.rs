//! Curves as SVG: one colour a way, one line a run. Pure.

use std::fmt::Write;

use super::chart::{COLOURS, escaped, rounds};

const WIDTH: f64 = 760.0;
const HEIGHT: f64 = 360.0;
const LEFT: f64 = 64.0;
const RIGHT: f64 = 16.0;
const TOP: f64 = 52.0;
const BOTTOM: f64 = 44.0;

/// A chart of curves.
#[derive(Debug)]
pub struct Curves {
    /// Above all of it.
    pub title: String,
    /// What the horizontal axis counts.
    pub unit_x: String,
    /// What the vertical axis counts.
    pub unit_y: String,
    /// What is drawn.
    pub curves: Vec<Curve>,
}

/// Runs of one kind.
#[derive(Debug)]
pub struct Curve {
    /// Their name.
    pub name: String,
    /// Points of each, in order.
    pub runs: Vec<Vec<(f64, f64)>>,
}

impl Curves {
    /// The whole file.
    pub fn svg(&self) -> String {
        let points = || self.curves.iter().flat_map(|curve| curve.runs.iter().flatten());
        let right = points().map(|(x, _)| *x).fold(1.0, f64::max);
        let low = points().map(|(_, y)| *y).fold(f64::INFINITY, f64::min);
        let high = points().map(|(_, y)| *y).fold(f64::NEG_INFINITY, f64::max);
        let (low, high) = (low - (high - low) * 0.05, high + (high - low) * 0.05 + 1e-9);
        let x = |at: f64| LEFT + at / right * (WIDTH - LEFT - RIGHT);
        let y = |value: f64| TOP + (high - value) / (high - low) * (HEIGHT - TOP - BOTTOM);
        let mut svg = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" font-family=\"sans-serif\" font-size=\"11\">\n\
             <rect width=\"{WIDTH}\" height=\"{HEIGHT}\" fill=\"#fff\"/>\n\
             <text x=\"{LEFT}\" y=\"20\" font-size=\"14\" fill=\"#222\">{}</text>\n",
            escaped(&self.title)
        );
        let step = rounds(high - low, 5.0).get(1).copied().unwrap_or(1.0);
        let places = if step < 0.01 { 3 } else { 2 };
        for n in (low / step).ceil() as i64..=(high / step).floor() as i64 {
            let (value, at) = (n as f64 * step, y(n as f64 * step));
            let _ = writeln!(
                svg,
                "<path d=\"M{LEFT} {at:.1}H{:.1}\" stroke=\"#e4e4e4\"/><text x=\"{:.0}\" y=\"{:.1}\" text-anchor=\"end\" fill=\"#555\">{value:.places$}</text>",
                WIDTH - RIGHT,
                LEFT - 6.0,
                at + 4.0
            );
        }
        for at in rounds(right, 8.0) {
            let (x, bottom) = (x(at), HEIGHT - BOTTOM);
            let _ = writeln!(
                svg,
                "<path d=\"M{x:.1} {TOP}V{bottom:.1}\" stroke=\"#f0f0f0\"/><text x=\"{x:.1}\" y=\"{:.1}\" text-anchor=\"middle\" fill=\"#555\">{at}</text>",
                bottom + 14.0
            );
        }
        let mut legend = LEFT;
        for (curve, colour) in self.curves.iter().zip(COLOURS) {
            for run in &curve.runs {
                let path: Vec<String> =
                    run.iter().map(|(at, value)| format!("{:.1} {:.1}", x(*at), y(*value))).collect();
                let _ = writeln!(
                    svg,
                    "<path d=\"M{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"1.5\"/>",
                    path.join("L")
                );
            }
            let _ = writeln!(
                svg,
                "<rect x=\"{legend:.0}\" y=\"28\" width=\"10\" height=\"10\" fill=\"{colour}\"/><text x=\"{:.0}\" y=\"37\" fill=\"#222\">{}</text>",
                legend + 14.0,
                escaped(&curve.name)
            );
            legend += 34.0 + 6.5 * curve.name.chars().count() as f64;
        }
        let (middle, bottom) = ((LEFT + WIDTH - RIGHT) / 2.0, HEIGHT - 10.0);
        let _ = writeln!(
            svg,
            "<text x=\"{middle}\" y=\"{bottom}\" text-anchor=\"middle\" fill=\"#555\">{}</text>",
            escaped(&self.unit_x)
        );
        let _ = writeln!(
            svg,
            "<text x=\"14\" y=\"{0:.0}\" transform=\"rotate(-90 14 {0:.0})\" text-anchor=\"middle\" fill=\"#555\">{1}</text>",
            HEIGHT / 2.0,
            escaped(&self.unit_y)
        );
        svg + "</svg>\n"
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_run_is_a_line_between_round_numbers() {
        let curve = |name: &str, shift: f64| Curve {
            name: name.into(),
            runs: vec![vec![(0.0, 0.70 + shift), (100.0, 0.80 + shift)]; 2],
        };
        let chart = Curves {
            title: "AUC".into(),
            unit_x: "steps".into(),
            unit_y: "AUC".into(),
            curves: vec![curve("4 workers", 0.0), curve("8 workers", 0.001)],
        };
        let svg = chart.svg();
        assert_eq!(svg.matches("fill=\"none\"").count(), 4);
        assert!(svg.contains(">0.70<") && svg.contains(">0.80<") && svg.contains(">4 workers<"), "{svg}");
        // From 5 % above the lower edge at the left to nearly as much below the upper one at the right.
        assert!(svg.contains("d=\"M64.0 304.0L744.0 66.4\""), "{svg}");
    }
}
