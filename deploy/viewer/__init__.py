"""`treadwheel view`: runs in the browser, down to the token. Reads run directories, live or done, and changes nothing.

No database, no build step, no network: pages are Jinja2 templates, `static/` contains ES modules and style sheets, and `static/curves.js`
draws curves as SVG. The content security policy allows no inline scripts or styles.

A page is one file in `pages/`, which is found without a list:

    def rewards(run: Run, request: Request) -> dict[str, Any]:      # reads the run, returns what JSON takes; tested without a server
        ...

    ROUTES = page("/run/{run}/rewards", rewards, template="rewards.html")

`page` makes two routes: the page, whose template gets the returned dict as `data`, and the dict as JSON at the same path with `.json`.
The template extends `layout.html` (blocks `title`, `main`, `scripts`) and gets

    root    prefix of every link: {{ root }}/run/{{ run.name }}/rewards
    run     the run; None on the list of runs
    data    what the function returned
    here    name of the page's module, which marks the entry of the navigation

`raise HTTPException(404, "step 12 was never recorded")` (starlette's) shows that sentence. Scripts are modules from `static/`:
`<script type="module" src="{{ root }}/static/weights.js"></script>`. They import the page's data and the run's address from `page.js`, and
write text only by `textContent`. The policy refuses `style="..."` in HTML: templates use classes, and scripts set `element.style`. The
colours of scales are variables at the top of `style.css`: `--sequential-0` to `-8`, `--diverging-0` to `-8`.
"""
