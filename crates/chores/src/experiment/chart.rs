//! Charts of use over time as SVG: stacked areas, one panel below the other on one axis of time. Pure.

use std::fmt::Write;

const WIDTH: f64 = 760.0;
const PANEL: f64 = 190.0;
const LEFT: f64 = 56.0;
const RIGHT: f64 = 16.0;
const TOP: f64 = 58.0;
const GAP: f64 = 40.0;
const BOTTOM: f64 = 44.0;
pub(super) const COLOURS: [&str; 4] = ["#3b76b8", "#e39a3b", "#5aa469", "#a05a8c"];
/// About so many lines across a panel, and along it.
const LINES_Y: f64 = 4.0;
const LINES_X: f64 = 8.0;

/// A chart.
#[derive(Debug)]
pub struct Chart {
    /// Above all of it.
    pub title: String,
    /// Names of what is stacked, the lowest first.
    pub series: Vec<String>,
    /// What the horizontal axis counts.
    pub unit_x: String,
    /// What the vertical axes count.
    pub unit_y: String,
    /// A line across every panel: what there is.
    pub limit: f64,
    /// From the top down.
    pub panels: Vec<Panel>,
}

/// One panel.
#[derive(Debug)]
pub struct Panel {
    /// Above it.
    pub title: String,
    /// Amounts by series, from each moment to the next; in order of time.
    pub steps: Vec<(f64, Vec<f64>)>,
    /// Where the last step ends.
    pub end: f64,
    /// Moments worth a mark, with a word each.
    pub marks: Vec<(f64, String)>,
}

impl Chart {
    /// The whole file.
    pub fn svg(&self) -> String {
        let height = TOP + (PANEL + GAP) * self.panels.len() as f64 - GAP + BOTTOM;
        let longest = self.panels.iter().map(|panel| panel.end).fold(1.0, f64::max);
        let mut svg = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" font-family=\"sans-serif\" font-size=\"11\">\n\
             <rect width=\"{WIDTH}\" height=\"{height}\" fill=\"#fff\"/>\n\
             <text x=\"{LEFT}\" y=\"20\" font-size=\"14\" fill=\"#222\">{}</text>\n",
            escaped(&self.title)
        );
        self.legend(&mut svg);
        for (n, panel) in self.panels.iter().enumerate() {
            self.panel(&mut svg, panel, TOP + (PANEL + GAP) * n as f64, longest);
        }
        let (x, y) = ((LEFT + WIDTH - RIGHT) / 2.0, height - 10.0);
        line(
            &mut svg,
            &format!(
                "<text x=\"{x}\" y=\"{y}\" text-anchor=\"middle\" fill=\"#555\">{}</text>",
                escaped(&self.unit_x)
            ),
        );
        svg + "</svg>\n"
    }

    fn legend(&self, svg: &mut String) {
        let mut x = LEFT;
        for (name, colour) in self.series.iter().zip(COLOURS) {
            line(svg, &format!("<rect x=\"{x:.0}\" y=\"28\" width=\"10\" height=\"10\" fill=\"{colour}\"/>"));
            line(
                svg,
                &format!("<text x=\"{:.0}\" y=\"37\" fill=\"#222\">{}</text>", x + 14.0, escaped(name)),
            );
            x += 34.0 + 6.5 * name.chars().count() as f64;
        }
    }

    fn panel(&self, svg: &mut String, panel: &Panel, top: f64, longest: f64) {
        let most = self.limit * 1.06;
        let x = |at: f64| LEFT + at / longest * (WIDTH - LEFT - RIGHT);
        let y = |amount: f64| top + PANEL - amount / most * PANEL;
        let title = escaped(&panel.title);
        line(svg, &format!("<text x=\"{LEFT}\" y=\"{:.0}\" fill=\"#222\">{title}</text>", top - 6.0));
        for amount in rounds(most, LINES_Y) {
            let y = y(amount);
            line(
                svg,
                &format!(
                    "<path d=\"M{LEFT} {y:.1}H{:.1}\" stroke=\"#e4e4e4\"/><text x=\"{:.0}\" y=\"{:.1}\" text-anchor=\"end\" fill=\"#555\">{amount}</text>",
                    WIDTH - RIGHT,
                    LEFT - 6.0,
                    y + 4.0
                ),
            );
        }
        for at in rounds(longest, LINES_X) {
            line(
                svg,
                &format!(
                    "<path d=\"M{0:.1} {top}V{1:.1}\" stroke=\"#f0f0f0\"/><text x=\"{0:.1}\" y=\"{2:.1}\" text-anchor=\"middle\" fill=\"#555\">{at}</text>",
                    x(at),
                    top + PANEL,
                    top + PANEL + 14.0
                ),
            );
        }
        for (series, colour) in (0..self.series.len()).zip(COLOURS).rev() {
            let path = outline(panel, series, &x, &y);
            line(svg, &format!("<path d=\"{path}\" fill=\"{colour}\"/>"));
        }
        let y = y(self.limit);
        line(
            svg,
            &format!(
                "<path d=\"M{LEFT} {y:.1}H{:.1}\" stroke=\"#888\" stroke-dasharray=\"4 3\"/>",
                WIDTH - RIGHT
            ),
        );
        for (at, word) in &panel.marks {
            let (x, word) = (x(*at), escaped(word));
            line(
                svg,
                &format!(
                    "<path d=\"M{x:.1} {top}V{:.1}\" stroke=\"#222\" stroke-dasharray=\"2 3\"/><text x=\"{:.1}\" y=\"{:.1}\" fill=\"#222\">{word}</text>",
                    top + PANEL,
                    x + 4.0,
                    top + 12.0
                ),
            );
        }
        line(
            svg,
            &format!(
                "<text x=\"14\" y=\"{0:.0}\" transform=\"rotate(-90 14 {0:.0})\" text-anchor=\"middle\" fill=\"#555\">{1}</text>",
                top + PANEL / 2.0,
                escaped(&self.unit_y)
            ),
        );
    }
}

/// The outline of the area below the upper edge of a series, down to zero: areas above are drawn first.
fn outline(panel: &Panel, series: usize, x: &impl Fn(f64) -> f64, y: &impl Fn(f64) -> f64) -> String {
    let upto = |amounts: &[f64]| amounts.iter().take(series + 1).sum::<f64>();
    let mut path = format!("M{:.1} {:.1}", x(0.0), y(0.0));
    let mut last = f64::NAN;
    for (at, amounts) in panel.steps.iter().filter(|(at, _)| *at <= panel.end) {
        let amount = upto(amounts);
        if amount != last {
            let _ = write!(path, "H{:.1}V{:.1}", x(*at), y(amount));
            last = amount;
        }
    }
    let _ = write!(path, "H{:.1}V{:.1}Z", x(panel.end), y(0.0));
    path
}

/// Round numbers up to `most`, about so many of them.
pub(super) fn rounds(most: f64, wanted: f64) -> Vec<f64> {
    let rough = most / wanted;
    let ten = 10_f64.powf(rough.log10().floor());
    let step =
        [1.0, 2.0, 5.0, 10.0].into_iter().map(|n| n * ten).find(|step| *step >= rough).unwrap_or(rough);
    (0..).map(|n| f64::from(n) * step).take_while(|at| *at <= most).collect()
}

fn line(svg: &mut String, text: &str) {
    svg.push_str(text);
    svg.push('\n');
}

pub(super) fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chart() -> Chart {
        Chart {
            title: "a < b".into(),
            series: vec!["first".into(), "second".into()],
            unit_x: "seconds".into(),
            unit_y: "CPU".into(),
            limit: 24.0,
            panels: vec![Panel {
                title: "gang".into(),
                steps: vec![(0.0, vec![0.0, 0.0]), (10.0, vec![12.0, 0.0]), (50.0, vec![12.0, 12.0])],
                end: 100.0,
                marks: vec![(30.0, "submitted".into())],
            }],
        }
    }

    #[test]
    fn areas_are_stacked_and_reach_to_the_end() {
        let svg = chart().svg();
        let path = |colour: &str| {
            let end = svg
                .find(&format!("\" fill=\"{colour}\"/>\n</"))
                .or(svg.find(&format!("Z\" fill=\"{colour}\"")));
            let end = end.unwrap();
            let begin = svg[..end].rfind("d=\"").unwrap();
            svg[begin + 3..end].to_owned()
        };
        // 24 of 25.44 is 179.2 of 190 pixels; 688 pixels are 100 seconds.
        assert!(path(COLOURS[0]).starts_with("M56.0 248.0H56.0V248.0H124.8V158.4"), "{}", path(COLOURS[0]));
        assert!(path(COLOURS[1]).contains("H124.8V158.4H400.0V68.8H744.0V248.0"), "{}", path(COLOURS[1]));
        assert!(svg.contains("a &lt; b") && svg.ends_with("</svg>\n"));
    }

    #[test]
    fn axes_count_in_round_numbers() {
        assert_eq!(rounds(25.4, 4.0), [0.0, 10.0, 20.0]);
        assert_eq!(rounds(800.0, 8.0), [0.0, 100.0, 200.0, 300.0, 400.0, 500.0, 600.0, 700.0, 800.0]);
        assert_eq!(rounds(0.9, 4.0).len(), 2);
    }
}
